"""The demo: its command, its job in a process of its own, and a reader that uses only stock Orbax."""
