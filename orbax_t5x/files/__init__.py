"""Bytes: files inside a root, limits, checksums and parsing.

Parsing is strict. The threads that read are here, too.
"""
