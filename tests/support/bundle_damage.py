"""Bundles with one damaged entry, and the outcomes that opening and reading them may have."""

import math
from pathlib import Path

import numpy as np
import pytest

from orbax_t5x.errors import (
    CheckpointError,
)
from orbax_t5x.lazy.box import full_box
from orbax_t5x.readers.tf_bundle.open import open_tf_bundle
from orbax_t5x.testing.leaf_reads import leaf_of, read_boxes, read_whole, same_bits

GOOD = np.arange(40, dtype=np.float32).reshape(8, 5)


VALUE = np.arange(6, dtype=np.float32)


def costs_one_leaf(prefix: Path, kind: type[CheckpointError], text: str) -> CheckpointError:
    """The bundle opens, `good` reads, `bad` is listed and raises."""
    with open_tf_bundle(prefix) as checkpoint:
        assert list(checkpoint.leaves) == ["bad", "good"]
        assert same_bits(read_whole(leaf_of(checkpoint, "good")), GOOD)
        bad = leaf_of(checkpoint, "bad")
        with pytest.raises(kind, match=text) as caught:
            read_boxes(
                bad, [full_box(bad.shape)] if math.prod(bad.shape) < 1000 else [tuple((0, 0) for _ in bad.shape)]
            )
        assert caught.value.leaf == "bad" and caught.value.path
        assert str(caught.value).startswith(caught.value.path)
    return caught.value
