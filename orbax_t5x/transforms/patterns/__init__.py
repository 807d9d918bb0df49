"""Rules as patterns over names."""
