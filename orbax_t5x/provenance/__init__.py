"""What was applied to a state before, as checkpoints record it."""
