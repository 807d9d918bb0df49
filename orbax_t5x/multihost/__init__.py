"""Coordinates the processes of one job: heartbeats, rendezvous, collectives, and agreement on one call."""
