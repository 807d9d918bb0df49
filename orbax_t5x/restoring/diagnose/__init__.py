"""Explains why a checkpoint and a target do not match."""
