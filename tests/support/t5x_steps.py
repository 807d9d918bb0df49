"""T5X steps of one array that is sound and one that a test makes hostile; links in place of files."""

import flax.serialization
import numpy as np
import tensorstore as ts

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
