"""Names, sizes and tables as text for people."""
