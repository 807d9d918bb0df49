"""Handlers for Orbax's `CheckpointManager` and `Checkpointer`.

Importing this package registers the handler and its arguments in Orbax's process-wide table; `import orbax_t5x` does
not.
"""

from orbax_t5x.handlers import args, checkpoint_handler

__all__ = ["args", "checkpoint_handler"]
