"""Heartbeats, barriers and collectives of the processes of a job."""
