"""Trees of arrays: names, nesting and dtypes; knows no checkpoint and no view."""
