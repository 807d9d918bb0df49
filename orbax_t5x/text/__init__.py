"""How names, sizes and tables are written for people."""
