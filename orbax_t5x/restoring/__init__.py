"""The engine: targets, plans and their execution."""
