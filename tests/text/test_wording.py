"""Sizes, shardings and control characters as they are printed."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from orbax_t5x.text.wording import did_you_mean, plain, sharding_text, size_text

MESH = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("data", "model"))


@pytest.mark.parametrize(
    ("count", "told"),
    [(0, "0 B"), (999, "999 B"), (1000, "0.98 KiB"), (1024, "1.00 KiB"), (1 << 20, "1.00 MiB"), (45 << 30, "45.0 GiB")],
)
def test_sizes(count, told):
    assert size_text(count) == told


@given(st.integers(0, 1 << 60))
def test_a_size_is_short_and_right(count):
    value, unit = size_text(count).split()
    assert len(value) <= 4
    exact = count / 1024 ** ("B", "KiB", "MiB", "GiB", "TiB", "PiB").index(unit)
    assert abs(float(value) - exact) <= 0.5 if float(value) >= 99.5 else abs(float(value) - exact) <= 0.05


def test_the_closest_choice_is_named():
    assert did_you_mean("inspct", ["inspect", "plan"]) == "; did you mean 'inspect'?"
    assert did_you_mean("zzz", ["inspect"]) == did_you_mean(3, ["inspect"]) == ""


def test_shardings():
    assert sharding_text(NamedSharding(MESH, P(None, ("data", "model")))) == "P(None, ('data', 'model'))"
    assert sharding_text(NamedSharding(MESH, P())) == "P()"
    assert sharding_text(jax.sharding.SingleDeviceSharding(jax.devices()[0])) == "1 device"
    assert sharding_text(NamedSharding(MESH, P(), memory_kind="pinned_host")) == "P() pinned_host"


def test_control_characters_are_told_not_sent():
    assert plain("a\x1b[31mb\nc") == "a\\x1b[31mb\\nc" and plain("größe/…") == "größe/…"
