"""Converts a checkpoint to an Orbax item or to safetensors files."""
