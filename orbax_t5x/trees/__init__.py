"""Trees of arrays: names, nesting and dtypes, without checkpoints or views."""
