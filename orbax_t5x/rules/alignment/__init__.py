"""Mappings between differently named trees of one model."""
