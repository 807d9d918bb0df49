"""Bytes: files inside a root, limits, checksums, strict parsing, and the threads that read."""
