"""Compares two checkpoints."""
