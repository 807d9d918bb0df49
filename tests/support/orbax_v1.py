"""Trees and comparisons for the tests of Orbax v1."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import UnsupportedCheckpointError

RULES = [ot.transforms.Rename((("w", "v"),))]


def abstract_of(tree: Any) -> Any:
    """Returns the tree without its values; leaves that JAX does not take for arrays stay."""

    def abstract(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        return leaf

    return jax.tree.map(abstract, tree)


def _values(leaf: Any) -> np.ndarray:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(leaf))
    return np.asarray(leaf)


def assert_same(got: Any, expected: Any) -> None:
    """Asserts that two trees have the same structure, types, dtypes and values."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert type(one) is type(other)
        assert getattr(one, "dtype", None) == getattr(other, "dtype", None)
        np.testing.assert_array_equal(_values(one), _values(other))


def flip_a_byte(item: Path) -> None:
    """Flips a byte in a chunk of an array that does not compress."""
    file = max((path for path in item.rglob("d/*") if path.is_file()), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


def refused(
    save: Callable[[], object], message: str, error: type[Exception] = UnsupportedCheckpointError
) -> BaseException:
    """Returns the error of a save that is refused."""
    with pytest.raises(error, match=message) as raised:
        save()
    value = raised.value
    # The warning of Orbax's coroutine is to come here.
    value.__traceback__ = None
    del raised
    gc.collect()
    return value
