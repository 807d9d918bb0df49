"""Limits on what a checkpoint may take."""

import dataclasses

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CorruptCheckpointError, LimitExceededError
from orbax_t5x.files.limits import Limits


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ot.Limits)])
def test_limits_are_positive(field):
    assert getattr(ot.Limits(**{field: 1}), field) == 1
    for value in (0, -5):
        with pytest.raises(ValueError, match=rf"{field}={value}\): a limit must be positive"):
            ot.Limits(**{field: value})


def test_a_shape_is_refused_by_its_rank_and_by_bytes_that_cannot_be_counted():
    limits = Limits(rank=3)
    limits.require_shape((1 << 40, 1 << 20), np.dtype(np.uint8))
    with pytest.raises(LimitExceededError, match=r"Limits\.rank = 3"):
        limits.require_shape((1, 1, 1, 1), np.dtype(np.uint8))
    with pytest.raises(CorruptCheckpointError, match="counted"):
        limits.require_shape((1 << 40, 0, 1 << 23), np.dtype(np.uint8))


def test_names_are_refused_by_their_utf_8_bytes_and_levels():
    limits = Limits(name_bytes=6, name_levels=2)
    limits.require_name("a/bcde", "/file")
    for name in ("abcdefg", "üüüü", "a/b/c"):
        with pytest.raises(LimitExceededError) as caught:
            limits.require_name(name, "/file")
        assert caught.value.path == "/file"


def test_a_chunk_is_refused_by_its_bytes():
    Limits(chunk_bytes=10).require_chunk(10, "it")
    with pytest.raises(LimitExceededError, match=r"Limits\.chunk_bytes = 10"):
        Limits(chunk_bytes=10).require_chunk(11, "it")
