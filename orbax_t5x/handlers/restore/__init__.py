"""Restores what Orbax itself restores, without a plan of ours."""
