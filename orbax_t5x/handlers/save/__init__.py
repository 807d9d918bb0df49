"""Prepares a tree for a save: names, dtypes and options.

It finds everything that cannot be stored.
"""
