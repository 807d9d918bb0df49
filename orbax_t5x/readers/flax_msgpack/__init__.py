"""Flax msgpack files, decoded strictly.

T5X's `checkpoint` files and early Orbax items are such files, too.
"""
