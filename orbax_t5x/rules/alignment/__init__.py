"""Finding the mapping between two trees of one model that are called differently."""
