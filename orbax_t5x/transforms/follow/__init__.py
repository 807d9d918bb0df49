"""Carries optimizer state along when its parameters are transformed."""
