"""Readers of checkpoints of every format."""

from orbax_t5x.files.limits import Limits
from orbax_t5x.readers.checkpoint import Checkpoint
from orbax_t5x.readers.format_table import Format, Mark, register_format
from orbax_t5x.readers.formats import open_checkpoint

__all__ = ["Checkpoint", "Format", "Limits", "Mark", "open_checkpoint", "register_format"]
