"""The names of Mesh TensorFlow T5 checkpoints and what they are in T5X."""
