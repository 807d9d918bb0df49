"""Gathers the send buffers of one round from several processes.

A row travels as unsigned bytes and is never computed with: signs of zeros and payloads of NaNs arrive as they were.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from orbax_t5x.concurrency import CallThread
from orbax_t5x.multihost.collectives import collective
from orbax_t5x.restoring.broadcast.schedule import ALIGNMENT

_AXIS = "process"


def empty_row(size: int) -> np.ndarray:
    """A row of zeros, at an address from which JAX takes it over without a copy."""
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    return memory[first : first + size]


def exchange_rows(row: np.ndarray, members: Sequence[int], path: str | None, thread: CallThread) -> np.ndarray:
    """The rows of all members; each of them must call it, and nobody else.

    Args:
      row: of this process; bytes, of one size on all members. It must not change before this returns.
      members: processes, ascending, this one among them.
      path: of what is being restored, for the error.
      thread: waits for the others. One for all rounds: each thread keeps memory of its own of what it has let go.

    Returns:
      Bytes [member, row].

    Raises:
      CheckpointIOError: a member does not answer.
    """
    if len(members) == 1:
        return row[None]
    return collective(lambda: _all_gather(row, members), path, thread, members)


def _all_gather(row: np.ndarray, members: Sequence[int]) -> np.ndarray:
    """By the first device of each member."""
    mesh = Mesh(np.asarray([jax.local_devices(process_index=member)[0] for member in members]), (_AXIS,))
    own = jax.device_put(row[None], jax.local_devices()[0])
    rows = jax.make_array_from_single_device_arrays(
        (len(members), row.size), NamedSharding(mesh, PartitionSpec(_AXIS)), [own]
    )
    gathered = jax.jit(_same, out_shardings=NamedSharding(mesh, PartitionSpec()))(rows)
    return np.asarray(gathered.addressable_data(0))


def _same(rows: jax.Array) -> jax.Array:
    return rows
