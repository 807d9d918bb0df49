"""Bundles of which one key, entry or the header is edited, and what can still be read of them."""

import math
from pathlib import Path

import numpy as np

from orbax_t5x.errors import CheckpointError
from orbax_t5x.readers.tf_bundle.open import open_tf_bundle
from orbax_t5x.readers.tf_bundle.proto import Extent
from orbax_t5x.testing.leaf_reads import leaf_of, read_boxes
from tests.support.bundle_writer import Bundle, bundle_of, table


def sealed_mutation(random) -> tuple[Bundle, bytes]:
    """A bundle of `a`, `t` and the sliced `w`, one key, entry or the header edited, every checksum made whole."""
    bundle = bundle_of({"a": np.arange(7, dtype=np.float32), "t": np.array([b"one", b"", b"three"], object)}, 2)
    rows = [[Extent(0, 2), Extent(0, -1)], [Extent(2, 3), Extent(0, -1)]]
    bundle.add_sliced("w", np.arange(20, dtype=np.int16).reshape(5, 4), rows)
    items = [(b"", bundle.header), *bundle.entries.items()]
    number = random.randrange(len(items))
    key, value = items[number]
    mutable = bytearray(value or b"\0")
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(mutable))
        mutable[at : at + random.randint(0, 1)] = random.randbytes(random.randint(0, 2))
        mutable = mutable or bytearray(1)
    items[number] = (key if random.random() < 0.9 else random.randbytes(3), bytes(mutable))
    entries = sorted(dict(items).items())
    return bundle, table(entries, block_bytes=64, restart_interval=random.randint(1, 4))


def values_of(prefix: Path) -> dict[str, np.ndarray]:
    """What can be read, by name; all that cannot be is a typed error."""
    found = {}
    try:
        checkpoint = open_tf_bundle(prefix)
    except CheckpointError:
        return found
    with checkpoint:
        for name in checkpoint.leaves:
            leaf = leaf_of(checkpoint, name)
            if math.prod(leaf.shape) * max(1, leaf.dtype.itemsize) > 1 << 20:
                continue
            try:
                found[name] = read_boxes(leaf).arrays[0]
            except CheckpointError as error:
                assert error.leaf == name
    return found
