"""Detection of the format at a path, from names and a few bytes."""
