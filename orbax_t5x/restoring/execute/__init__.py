"""Plans are carried out here: all reading of array bytes into shards."""
