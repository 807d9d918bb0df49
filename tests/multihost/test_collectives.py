"""Errors that are sent between processes: the others raise what the first one raised, with its fix."""

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointIOError, CorruptCheckpointError, Fix
from orbax_t5x.multihost.collectives import error_as_bytes, received_error

FIXES = [
    None,
    Fix("rename it"),
    Fix.in_program("call it"),
    Fix.setting("name one by {}", item=...),
    Fix.any_of(Fix.setting("pass {} to replace it", overwrite=True), Fix.by_target("build another model")),
]


@pytest.mark.parametrize("fix", FIXES)
def test_a_fix_is_sent_with_its_error(fix):
    received = received_error([3], error_as_bytes(CorruptCheckpointError("bad", path="/a", leaf="b", fix=fix)), None)
    assert type(received) is CorruptCheckpointError and received.message == "bad (on process 3)"
    assert (received.path, received.leaf, received.fix) == ("/a", "b", fix)


@pytest.mark.parametrize("fix", [Fix.adding(ot.transforms.Translate()), Fix.setting("pass {}", dtype=np.dtype("f4"))])
def test_a_fix_that_json_cannot_hold_is_sent_as_text(fix):
    received = received_error([0], error_as_bytes(CheckpointIOError("bad", fix=fix, errno=5)), None)
    assert isinstance(received, CheckpointIOError) and received.errno == 5
    assert received.fix == Fix.in_program(fix.text)
