"""Records in checkpoints of the transforms that were applied to a state."""
