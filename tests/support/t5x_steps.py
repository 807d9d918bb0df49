"""T5X steps of one array that is sound and one that a test makes hostile; links in place of files."""

import hashlib
import json

import flax.serialization
import numpy as np
import pytest
import tensorstore as ts

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointError

GOOD = np.arange(6, dtype=np.float32).reshape(2, 3)


def array(directory, **metadata):
    """A zarr array of `GOOD`, written by TensorStore."""
    said = {"shape": [2, 3], "chunks": [2, 3], "dtype": "<f4", "compressor": {"id": "gzip", "level": 1}, **metadata}
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{directory}/"}, "metadata": said}
    ts.open(spec, create=True).result().write(GOOD).result()
    return directory


def spec(place="bad/", **changes):
    said = {
        "driver": "zarr",
        "dtype": "float32",
        "kvstore": {"driver": "file", "path": place},
        "metadata": {"shape": [2, 3], "chunks": [2, 3], "compressor": {"id": "gzip", "level": 1}},
    }
    return {key: value for key, value in (said | changes).items() if value is not ...}


def save(step, bad, version=3, **others):
    tree = {"version": version, "optimizer": {"bad": bad, "good": spec("good/"), **others}}
    (step / "checkpoint").write_bytes(flax.serialization.msgpack_serialize(tree))


def link(place, target):
    if place.is_dir():
        for file in place.iterdir():
            file.unlink()
        place.rmdir()
    elif place.exists():
        place.unlink()
    place.symlink_to(target)


def digest(directory):
    """Names and bytes of everything below a directory."""
    found = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        found.update(repr((str(path), path.is_symlink() or path.is_dir())).encode())
        if path.is_file() and not path.is_symlink():
            found.update(path.read_bytes())
    return found.hexdigest()


def broken(step, kind, match=None):
    """The error of the leaf `bad`, beside which `good` is read; nothing was written."""
    before = digest(step.parent)
    with ot.open_checkpoint(step) as checkpoint:
        assert list(checkpoint.leaves) == ["bad", "good"]
        np.testing.assert_array_equal(checkpoint.leaves["good"].get(), GOOD)
        with pytest.raises(CheckpointError, match=match) as caught:
            checkpoint.leaves["bad"].get()
    assert type(caught.value) is kind, repr(caught.value)
    assert caught.value.leaf == "bad" and str(step) in (caught.value.path or "")
    assert digest(step.parent) == before
    return caught.value


def good(step):
    with ot.open_checkpoint(step) as checkpoint:
        np.testing.assert_array_equal(checkpoint.leaves["bad"].get(), GOOD)


def edit(step, **changes):
    path = step / "bad" / ".zarray"
    said = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in said.items() if value is not ...}))
