"""Exchanges the send buffers of one round between several processes.

A send buffer travels as unsigned bytes with which nothing is computed: signs of zeros and payloads of NaNs arrive
unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from orbax_t5x.concurrency import CallThread
from orbax_t5x.multihost.collectives import collective
from orbax_t5x.restoring.broadcast.rounds import ALIGNMENT

_AXIS = "process"


def empty_buffer(size: int) -> np.ndarray:
    """Allocates zeros at an address from which JAX takes them over without a copy."""
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    return memory[first : first + size]


def exchange_buffers(buffer: np.ndarray, members: Sequence[int], path: str | None, thread: CallThread) -> np.ndarray:
    """Exchanges the send buffers of all members (ascending), bytes [slot, byte] of one size, which all must call.

    One `thread` waits in all rounds: each thread keeps memory of its own of what it has let go. The buffer must not
    change before this returns.

    Returns:
      What this process gets of each member as bytes [member, byte]: the only slot, or the slot that is this process's.
    """
    if len(members) == 1:
        return buffer
    return collective(lambda: _exchange_slots(buffer, members), path, thread, members)


def _exchange_slots(buffer: np.ndarray, members: Sequence[int]) -> np.ndarray:
    """Gathers the only slot of all members through their first devices, or sends each member its slot (all-to-all)."""
    mesh = Mesh(np.asarray([jax.local_devices(process_index=member)[0] for member in members]), (_AXIS,))
    own = jax.device_put(buffer[None], jax.local_devices()[0])
    buffers = jax.make_array_from_single_device_arrays(
        (len(members), *buffer.shape), NamedSharding(mesh, PartitionSpec(_AXIS)), [own]
    )
    slots = PartitionSpec() if len(buffer) == 1 else PartitionSpec(None, _AXIS)
    exchanged = jax.jit(_same, out_shardings=NamedSharding(mesh, slots))(buffers)
    return np.asarray(exchanged.addressable_data(0))[:, 0]


def _same(buffers: jax.Array) -> jax.Array:
    return buffers
