"""Optimizers and their states, for the T5X modules at the top."""
