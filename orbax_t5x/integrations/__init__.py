"""Classes that other packages' training loops take: T5X's checkpointer, Kauldron's `init_transform`.

Each module is imported by itself, and only `kauldron` needs its package.
"""
