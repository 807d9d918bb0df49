"""Checkpoints that T5X itself wrote: a msgpack file, and zarr arrays beside it."""
