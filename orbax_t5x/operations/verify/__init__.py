"""Verifies every checksum of a checkpoint."""
