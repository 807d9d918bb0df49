"""Two checkpoints of a T5 compute the same logits, in whatever formats and layouts, or the difference is reported."""

import numpy as np
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.errors import UnsupportedCheckpointError
from orbax_t5x.extras.demo.compare_logits import LogitsReport, compare_logits
from tests.support.memory_checkpoint import checkpoint


def compared(a, b, **options):
    with ot.open_checkpoint(a) as one, ot.open_checkpoint(b) as other:
        return compare_logits(one, other, length=8, **options)


@pytest.mark.slow
def test_a_conversion_and_back_computes_the_same_and_a_changed_one_does_not(goldens, tmp_path):
    source = goldens / "hf_logits" / "tied_relu"
    scanned = [ot.rules.hf_t5_to_t5x(), ot.rules.t5_minimal_to_scanned(3, 4)]
    ot.convert(source, tmp_path / "scanned", scanned)
    same = compared(source, tmp_path / "scanned")
    assert same.is_close and same.max_abs <= 1e-5 and same.shape == (2, 8, 32) and same.same_top == 16

    values = safetensors.numpy.load_file(source / "model.safetensors")
    name = "decoder.block.2.layer.2.DenseReluDense.wo.weight"
    values[name] = values[name] + np.float32(0.05)
    safetensors.numpy.save_file(values, tmp_path / "changed.safetensors")
    other = compared(source, tmp_path / "changed.safetensors")
    assert not other.is_close and 0 < other.max_rel == other.max_abs / other.largest
    assert other.to_json()["max_abs"] == other.max_abs and "different" in str(other)


def test_what_is_no_t5_is_refused():
    dense = checkpoint({"dense/kernel": np.zeros((2, 2))})
    with pytest.raises(UnsupportedCheckpointError, match="no T5"):
        compare_logits(dense, dense)


def test_no_number_is_no_equality():
    report = LogitsReport("a", "b", (1, 2, 3), float("nan"), float("nan"), 0, False)
    assert report.to_json()["max_abs"] is None and report.to_json()["max_rel"] is None
    assert report.to_json()["positions"] == 2
