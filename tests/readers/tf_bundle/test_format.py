"""Bundles are recognised by names, damaged ones too."""

import pytest

import orbax_t5x as ot
from orbax_t5x.errors import UnsupportedCheckpointError


def test_the_bundles_of_tensorflow(goldens):
    bundles = goldens / "tf_bundle"
    if not bundles.exists():
        pytest.fail("the golden TensorFlow bundles are missing")
    directory = bundles / "t5_1_1_f32"
    prefix = directory / "model.ckpt-1000000"
    for path in (directory, prefix, f"{prefix}.index", directory / "checkpoint"):
        with ot.open_checkpoint(path) as checkpoint:
            assert (checkpoint.format, checkpoint.step) == ("tf_bundle", 1000000)
    with pytest.raises(UnsupportedCheckpointError, match="has no items"):
        ot.open_checkpoint(directory, item="state")


def test_a_damaged_bundle_is_still_one(tmp_path):
    (tmp_path / "model.ckpt-7.index").write_bytes(b"short")
    (tmp_path / "model.ckpt-7.data-00000-of-00001").write_bytes(b"")
    for path in (tmp_path, tmp_path / "model.ckpt-7", tmp_path / "model.ckpt-7.index"):
        with pytest.raises(ot.errors.CorruptCheckpointError, match=r"model\.ckpt-7\.index"):
            ot.open_checkpoint(path)
