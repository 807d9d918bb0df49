"""An opened checkpoint: its files stay open as long as a leaf needs them; its metadata are JSON."""

import gc
import json

import numpy as np
import pytest
import safetensors.numpy

import orbax_t5x as ot


@pytest.mark.parametrize("format", ["orbax", "safetensors", "tf_bundle"])
def test_a_leaf_keeps_its_checkpoint_open(tmp_path, orbax_item, goldens, format, descriptors):
    if format == "safetensors":
        safetensors.numpy.save_file({"w": np.arange(3)}, tmp_path / "model.safetensors")
    path = {
        "orbax": orbax_item,
        "safetensors": tmp_path / "model.safetensors",
        "tf_bundle": goldens / "tf_bundle" / "t5_1_1_f32",
    }[format]
    lazy = next(iter(ot.open_checkpoint(path).leaves.values()))
    gc.collect()
    first = lazy.get()
    np.testing.assert_array_equal(lazy.get(), first)
    if format != "orbax":
        assert descriptors
    del lazy
    assert descriptors.all_closed()


@pytest.mark.parametrize("format", ["safetensors", "tf_bundle"])
def test_closing_closes_files(tmp_path, goldens, format, descriptors):
    safetensors.numpy.save_file({"w": np.arange(3)}, tmp_path / "model.safetensors")
    path = tmp_path if format == "safetensors" else goldens / "tf_bundle" / "t5_1_1_f32"
    with ot.open_checkpoint(path) as checkpoint:
        next(iter(checkpoint.leaves.values())).get()
        assert descriptors
    assert not descriptors


def test_metadata_can_be_written_as_json(orbax_item, goldens):
    for path in (orbax_item, goldens / "safetensors" / "t5_1_1", goldens / "t5x_orbax" / "d8_adafactor"):
        with ot.open_checkpoint(path) as checkpoint:
            assert json.loads(json.dumps(checkpoint.metadata)) == checkpoint.metadata
