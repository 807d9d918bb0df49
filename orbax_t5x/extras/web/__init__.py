"""Checkpoints on web servers and the Hugging Face hub."""
