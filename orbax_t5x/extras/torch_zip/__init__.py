"""PyTorch's files, read without PyTorch and without running their pickle."""
