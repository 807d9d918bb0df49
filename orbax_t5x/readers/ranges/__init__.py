"""Arrays that are byte ranges of files."""
