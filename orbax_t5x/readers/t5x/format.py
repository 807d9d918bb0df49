"""Recognises T5X's own checkpoints by the first keys of their msgpack file."""

from __future__ import annotations

from orbax_t5x import on_demand
from orbax_t5x.readers.detect.format import Format
from orbax_t5x.readers.detect.probe import PathProbe, is_t5x_msgpack, is_t5x_state
from orbax_t5x.readers.orbax.steps import MSGPACK_FILE


def is_t5x(probe: PathProbe) -> bool:
    """Reports whether a path is a step's directory, or a file of T5X's with its version in it."""
    if probe.kind == "directory":
        return MSGPACK_FILE in probe.names and is_t5x_state(probe.inside(MSGPACK_FILE))
    return is_t5x_msgpack(probe)


_open = on_demand.function("orbax_t5x.readers.t5x.open", "open_t5x")
FORMAT = Format("t5x", "a T5X step (a msgpack file 'checkpoint')", is_t5x, _open)
