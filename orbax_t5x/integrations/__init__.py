"""Classes that the training loops of other packages take."""
