"""Only the same conversion is resumed."""

import logging

import numpy as np
import pytest

import orbax_t5x as ot
from tests.support.bundle_writer import bundle_of
from tests.support.killed_blocks import ARRAYS, MIB, assert_holds, convert, leave

FORMATS = ["orbax", "safetensors"]
TOTAL = sum(array.nbytes for array in ARRAYS.values())


@pytest.mark.parametrize("format", FORMATS)
def test_of_another_source_nothing_is_kept(format, source, out, caplog):
    caplog.set_level(logging.INFO, "orbax_t5x")
    leave(source, out, format=format)
    changed = ARRAYS | {"leaf_3": np.zeros((64, 1024), np.float32)}
    bundle_of(changed).write(source.parent)
    assert convert(source, out, format=format).kept_bytes == 0
    assert any("begins anew" in record.getMessage() for record in caplog.records)
    assert_holds(out, format, changed)


@pytest.mark.slow
def test_of_other_transforms_nothing_is_kept_and_of_equal_ones_all(source, out):
    def first(state, target):
        return {name: view[::-1] for name, view in state.items()}

    leave(source, out, lambda state, target: {name: view[::-2] for name, view in state.items()})
    leave(source, out, first)
    report = convert(source, out, lambda state, target: {name: view[::-1] for name, view in state.items()})
    assert 0 < report.kept_bytes < TOTAL
    assert_holds(out, "orbax", {name: array[::-1] for name, array in ARRAYS.items()})


def test_constants_count_by_their_contents(source, out):
    def adding(value):
        constant = np.full((1, 1024), value, np.float32)
        return lambda state, target: {name: ot.concatenate([view, constant], 0) for name, view in state.items()}

    leave(source, out, adding(1))
    assert convert(source, out, adding(2)).kept_bytes == 0
    expected = {name: np.concatenate([array, np.full((1, 1024), 2, np.float32)]) for name, array in ARRAYS.items()}
    assert_holds(out, "orbax", expected)


def test_another_format_begins_anew(source, out):
    leave(source, out)
    assert convert(source, out, format="safetensors").kept_bytes == 0
    assert_holds(out, "safetensors", ARRAYS)


def test_another_memory_limit_goes_on_where_the_chunks_are_the_same(source, out):
    leave(source, out, limit=4 * MIB)
    assert convert(source, out, limit=8 * MIB).kept_bytes > 0
    assert_holds(out, "orbax", ARRAYS)
