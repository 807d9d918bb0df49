"""What becomes of optimizer state when a parameter is transformed."""
