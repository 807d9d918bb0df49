"""NumPy's `.npz` files."""
