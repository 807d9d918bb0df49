"""The demo, and the comparison of two models by their logits."""
