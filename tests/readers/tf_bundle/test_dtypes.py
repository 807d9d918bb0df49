"""Dtypes of entries, by TensorFlow's numbers."""

from pathlib import Path

import numpy as np
import pytest

from orbax_t5x.errors import UnsupportedCheckpointError
from orbax_t5x.readers.tf_bundle.open import open_tf_bundle
from orbax_t5x.testing.leaf_reads import leaf_of, read_whole, same_bits
from tests.support.bundle_damage import VALUE, costs_one_leaf, place, with_entry
from tests.support.bundle_writer import entry


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        (0, "no dtype"),
        (9999, "9999"),
        (20, "resource"),
        (21, "variant"),
        (11, "qint8"),
        (101, "reference"),
        (114, "reference"),
    ],
)
def test_dtypes(tmp_path: Path, dtype: int, text: str) -> None:
    prefix = with_entry(tmp_path, entry(dtype, [6], **place()))
    costs_one_leaf(prefix, UnsupportedCheckpointError, text)
    with open_tf_bundle(prefix) as checkpoint:
        assert leaf_of(checkpoint, "bad").shape == (6,)


def test_a_dtype_of_the_same_width_cannot_be_told_apart(tmp_path: Path) -> None:
    with open_tf_bundle(with_entry(tmp_path, entry("int32", [6], **place()))) as checkpoint:
        assert same_bits(read_whole(leaf_of(checkpoint, "bad")), VALUE.view(np.int32))
