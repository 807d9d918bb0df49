"""Broadcasts stored bytes: a single process reads each, and sends it on."""
