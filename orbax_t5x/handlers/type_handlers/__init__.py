"""Writes single leaves: lazy arrays by chunk, with checksums.

Their type handlers for Orbax are here, too.
"""
