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


def test_a_name_is_refused_by_its_levels_and_if_it_has_no_utf_8_form():
    limits = Limits(nesting=2)
    limits.require_name("a/b", "/file")
    with pytest.raises(LimitExceededError, match=r"Limits\.nesting = 2") as caught:
        limits.require_name("a/b/c", "/file")
    assert caught.value.path == "/file"
    with pytest.raises(CorruptCheckpointError, match="half a character"):
        limits.require_name("a\ud800", "/file")
