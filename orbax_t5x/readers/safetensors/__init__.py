"""Safetensors files and directories."""
