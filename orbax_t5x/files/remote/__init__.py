"""Reads files of web servers, buckets and the Hugging Face hub."""
