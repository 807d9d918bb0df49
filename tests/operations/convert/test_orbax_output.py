"""A plan's views as a plain Orbax item."""

import jax
import ml_dtypes
import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import UnsupportedCheckpointError
from orbax_t5x.provenance import records as provenance
from tests.support.conversions import BUNDLES, GOLDENS, assert_equals, flat, names_in, record_of
from tests.support.memory_checkpoint import checkpoint
from tests.support.saving import stock


@pytest.mark.slow
@pytest.mark.parametrize("name", BUNDLES)
def test_bundles_keep_every_value_and_dtype(tmp_path, name):
    source = GOLDENS / "tf_bundle" / name
    ot.convert(source, tmp_path / "out")
    with ot.open_checkpoint(source) as opened:
        expected = {leaf: view.get() for leaf, view in opened.leaves.items()}
    restored = flat(stock(tmp_path / "out"))
    assert_equals(restored, expected)
    with np.load(source / "expected.npz") as values:
        for leaf, array in restored.items():
            np.testing.assert_array_equal(np.asarray(array, values[leaf].dtype), values[leaf])
    (record,) = provenance.from_metadata(record_of(tmp_path / "out"))
    assert record["format"] == "tf_bundle" and record["transforms"] is None
    assert record["source"].startswith(str(source))
    assert names_in(tmp_path) == ["out"]


@pytest.mark.parametrize("name", ["dtype_zoo", "partitioned"])
def test_leaves_that_orbax_cannot_store_are_named_before_anything_is_written(tmp_path, name):
    source = GOLDENS / "tf_bundle" / name
    with pytest.raises(UnsupportedCheckpointError) as raised:
        ot.convert(source, tmp_path / "out")
    with ot.open_checkpoint(source) as opened:
        leaves = dict(opened.leaves)
        bad = [
            name
            for name, view in leaves.items()
            if 0 in view.shape or view.dtype.hasobject or view.dtype == ml_dtypes.uint4
        ]
        assert bad and any(name in str(raised.value) for name in bad)
        assert names_in(tmp_path) == []
        ot.convert(source, tmp_path / "out", on_unsupported="skip")
        assert_equals(
            flat(stock(tmp_path / "out")), {name: view.get() for name, view in leaves.items() if name not in bad}
        )
        skipped = provenance.skipped_from_metadata(record_of(tmp_path / "out"))
        assert skipped == {name: (leaves[name].shape, str(leaves[name].dtype)) for name in bad}


def test_none_and_empty_nodes_stay(tmp_path):
    source = checkpoint({"a/w": np.ones(2)}, empties={"a/none": None, "b": {}, "c": []})
    ot.convert(source, tmp_path / "out")
    restored = stock(tmp_path / "out")
    assert restored["a"]["none"] is None and restored["b"] == {} and restored["c"] == []


def test_empty_nodes_stay_beside_what_transforms_make(tmp_path):
    """As long as some of the leaves beside them are left, and no leaf takes their name."""
    arrays = {"a/w": np.ones(2), "opt/1/mu": np.ones(2)}
    source = checkpoint(arrays, empties={"a/none": None, "b": {}, "c": [], "opt/0": {}, "lone/x": {}})
    cast = [ot.transforms.Cast("a/w", "float16")]
    ot.convert(source, tmp_path / "cast", cast)
    restored = stock(tmp_path / "cast")
    assert restored["opt"]["0"] == {} and restored["b"] == {} and restored["c"] == [] and restored["a"]["none"] is None
    assert jax.tree.structure(ot.restore(source, None, cast)["opt"]) == jax.tree.structure({"0": {}, "1": {"mu": 0}})
    dropped = ot.restore(source, None, [ot.transforms.Drop("opt/.*"), ot.transforms.Rename([("a/w", "b")])])
    assert dropped.keys() == {"a", "b", "c", "lone"} and isinstance(dropped["b"], np.ndarray)


def test_a_name_that_is_also_a_prefix_keeps_its_leaves(tmp_path):
    source = checkpoint({"a": np.ones(2), "a/b": np.zeros(3), "a/c/d": np.ones(1)}, format="tf_bundle")
    ot.convert(source, tmp_path / "out")
    with ot.open_checkpoint(tmp_path / "out") as opened:
        assert {name: view.shape for name, view in opened.leaves.items()} == {"a": (2,), "a/b": (3,), "a/c/d": (1,)}
