"""Restores by Orbax itself, without a plan of ours."""
