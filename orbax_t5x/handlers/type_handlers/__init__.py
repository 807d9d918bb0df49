"""Writes single leaves: lazy arrays chunk by chunk, with checksums, and their type handlers for Orbax."""
