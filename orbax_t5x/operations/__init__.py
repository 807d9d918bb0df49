"""Operations on whole checkpoints.

Conversion, comparison, verification, and the start of a training job.
"""
