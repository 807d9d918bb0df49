"""Bundles with one damaged entry, and the outcomes that opening and reading them may have."""

import math
from pathlib import Path

import google_crc32c
import numpy as np
import pytest

from orbax_t5x.errors import CheckpointError
from orbax_t5x.lazy.box import full_box
from orbax_t5x.readers.tf_bundle.open import open_tf_bundle
from orbax_t5x.testing.leaf_reads import leaf_of, read_boxes, read_whole, same_bits
from tests.support.bundle_writer import bundle_of

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


def with_entry(directory: Path, value: bytes, *, shards: int = 1) -> Path:
    """A bundle of a sound leaf `good` and of `bad`, whose entry is `value`."""
    bundle = bundle_of({"good": GOOD}, shards)
    bundle.store(VALUE)
    bundle.entries[b"bad"] = value
    return bundle.write(directory)


def place(**change) -> dict[str, int]:
    """Where VALUE really is, but for the change."""
    return {"offset": GOOD.nbytes, "size": VALUE.nbytes, "crc": google_crc32c.value(VALUE.tobytes()), **change}
