"""Names of Mesh TensorFlow's T5 checkpoints and their meaning in T5X."""
