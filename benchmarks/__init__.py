"""Whole jobs beside their peers: alternating runs in fresh processes, ratios and peak memory. See README.md here."""
