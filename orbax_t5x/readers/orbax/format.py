"""Recognises items and steps of Orbax by the names in a directory and in its subdirectories."""

from __future__ import annotations

from orbax_t5x import on_demand
from orbax_t5x.readers.detect.format import Format
from orbax_t5x.readers.detect.probe import PathProbe, is_file, is_msgpack_map, is_t5x_state
from orbax_t5x.readers.orbax.steps import MANIFEST_FILE, MSGPACK_FILE, STEP_METADATA_FILE, is_item, is_step_directory


def is_orbax(probe: PathProbe) -> bool:
    """Reports whether a directory is a step or an item, also one without its list of names or of an early Orbax."""
    if probe.kind != "directory":
        return False
    if MANIFEST_FILE in probe.names or is_item(probe.path) or is_file(probe.path, STEP_METADATA_FILE):
        return True
    if MSGPACK_FILE in probe.names and is_msgpack_map(file := probe.inside(MSGPACK_FILE)):
        return not is_t5x_state(file)
    return is_step_directory(probe.path)


_open = on_demand.function("orbax_t5x.readers.orbax.open", "open_orbax")
FORMAT = Format("orbax", "an Orbax item or step (_METADATA, _CHECKPOINT_METADATA)", is_orbax, _open, open_item=_open)
