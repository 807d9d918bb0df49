"""Flax msgpack files: one strict decoder, for T5X's `checkpoint` files and early Orbax items too."""
