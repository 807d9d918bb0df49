"""Broadcasts stored bytes: each is read by one process and sent to those that need it."""
