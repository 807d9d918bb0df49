"""Starts a training job.

From its own newest step, from another checkpoint, or from scratch.
"""
