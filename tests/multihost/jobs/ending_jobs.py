"""Jobs of `multiprocess_worker` in which one process is killed in a restore."""

from unittest import mock

import jax

import orbax_t5x as ot
from orbax_t5x.multihost import openings
from orbax_t5x.restoring import joint_executor
from orbax_t5x.restoring.broadcast import send
from tests.multihost.jobs import multiprocess_worker as worker
from tests.multihost.jobs.broadcast_jobs import placed

_WHERE = {
    "the catalogue is awaited": (openings, "_received"),
    "buffers are exchanged": (send, "exchange_buffers"),
    "checksums are exchanged": (joint_executor, "gather_checksums"),
}


def restore_where_one_dies(source, where, process):
    """Restores what one process reads and sends; one process is killed where it would call a function."""
    module, name = _WHERE[where]
    function = getattr(module, name)

    def ending(*given, **named):
        if jax.process_index() == int(process):
            worker.die()
        return function(*given, **named)

    target = {"w": placed((64, 64), jax.numpy.dtype("float32"), "replicated")}
    with mock.patch.object(module, name, ending):
        ot.restore(source, target, broadcast=True)
