"""A leaf that the checkpoint names and that cannot be made sense of: it is listed, and everything that needs it gets
its error.

So a checkpoint with one damaged entry still opens, its other leaves are restored, and the damaged one is never dropped
in silence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from orbax_t5x.errors import CheckpointError
from orbax_t5x.lazy.leaf import Ledger, Part, Request


class BrokenLeaf:
    """Implements `lazy.Leaf` for a leaf whose shape and dtype nobody knows; they read as () and object.

    Attributes:
      error: what is wrong; a plan that needs the leaf raises it.
    """

    def __init__(self, name: str, error: CheckpointError):
        self.name = name
        self.path = error.path or ""
        self.shape: tuple[int, ...] = ()
        self.chunks: tuple[int, ...] | None = None
        self.dtype = np.dtype(object)
        self.error = error

    async def read_into(self, requests: Sequence[Request], ledger: Ledger) -> None:
        """Raises the error, a new one each time: a traceback belongs to one raise."""
        raise type(self.error)(self.error.message, path=self.error.path, leaf=self.error.leaf)

    async def settle(self, ledger: Ledger, parts: Sequence[Part]) -> bool | None:
        """There is nothing to check."""
        return None

    def __repr__(self) -> str:
        return f"<BrokenLeaf {self.name!r}: {self.error}>"
