"""Plans as text, tables, HTML and JSON."""
