"""TensorFlow bundles, read without TensorFlow."""
