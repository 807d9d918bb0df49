"""The command line: `orbax-t5x`, or `python -m orbax_t5x`."""
