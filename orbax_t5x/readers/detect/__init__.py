"""Detection of a path's format, from names and a few bytes."""
