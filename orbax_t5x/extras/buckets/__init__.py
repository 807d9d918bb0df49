"""Checkpoints in buckets of Amazon's and Google's protocols."""
