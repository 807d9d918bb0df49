"""Jobs of `multiprocess_worker` in which one process ends in a restore: around the catalogue, or around a broadcast."""

from unittest import mock

import jax

import orbax_t5x as ot
from orbax_t5x.multihost import openings
from orbax_t5x.readers import together
from orbax_t5x.restoring import joint_executor
from orbax_t5x.restoring.broadcast import send
from tests.multihost.jobs import multiprocess_worker as worker
from tests.multihost.jobs.broadcast_jobs import placed

_WHERE = {
    "the opener opens": (together, "open_checkpoint"),
    "the catalogue is awaited": (openings, "_received"),
    "the catalogue is received": (openings, "read_pieces"),
    "buffers are exchanged": (send, "exchange_buffers"),
    "checksums are exchanged": (joint_executor, "gather_checksums"),
}


def _restore(source, where, process, end):
    """Restores what one process reads and sends; one process ends where it would call a function."""
    worker.send_heartbeats_often()
    module, name = _WHERE[where]
    function = getattr(module, name)

    def ending(*given, **named):
        if jax.process_index() == int(process):
            worker.end_silently(end)
        return function(*given, **named)

    target = {"w": placed((64, 64), jax.numpy.dtype("float32"), "replicated")}
    with mock.patch.object(module, name, ending):
        ot.restore(source, target, broadcast=True)


def restore_where_one_dies(source, where, process):
    """It is killed."""
    _restore(source, where, process, worker.die)


def restore_where_one_stops(source, where, process):
    """It is stopped."""
    _restore(source, where, process, worker.stop)
