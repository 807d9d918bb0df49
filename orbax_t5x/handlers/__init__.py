"""The thin coat over Orbax: what `ocp.CheckpointManager` and `ocp.Checkpointer` call.

Importing this package enters the handler and its arguments into Orbax's process-wide table, once; `import orbax_t5x`
alone does not.
"""

from orbax_t5x.handlers import args, checkpoint_handler

__all__ = ["args", "checkpoint_handler"]
