"""Outer parts of the package, a folder each.

The core reaches them by its registries only.
"""
