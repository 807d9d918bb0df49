"""The optimizers and their state: what the T5X modules at the top are made of."""
