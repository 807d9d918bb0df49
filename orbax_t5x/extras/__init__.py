"""Outer parts of the package, a folder each; the core reaches them by its registries only."""
