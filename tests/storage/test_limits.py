"""Limits on what a checkpoint may take."""

import dataclasses

import pytest

import orbax_t5x as ot


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ot.Limits)])
def test_limits_are_positive(field):
    assert getattr(ot.Limits(**{field: 1}), field) == 1
    for value in (0, -5):
        with pytest.raises(ValueError, match=rf"{field}={value}\): a limit must be positive"):
            ot.Limits(**{field: value})
