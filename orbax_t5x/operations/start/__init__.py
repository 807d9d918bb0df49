"""Starts a training job: from its own newest step, from another checkpoint, or from scratch."""
