"""T5X's own checkpoints: a msgpack file beside zarr arrays."""
