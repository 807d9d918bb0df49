"""Prepares a tree for a save: names, dtypes, options, and everything that cannot be stored."""
