"""What stands at a path, from names and a few bytes."""
