"""Broadcasts stored bytes.

A single process reads each byte and sends it to the processes that need it.
"""
