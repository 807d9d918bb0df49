"""Barriers and collectives of the processes of a job."""
