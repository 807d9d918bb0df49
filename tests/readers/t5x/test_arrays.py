"""Arrays of a T5X checkpoint: links, pipes, damaged chunks, and what versions stored."""

import gzip
import os

import flax.serialization
import numpy as np
import pytest
import tensorstore as ts

import orbax_t5x as ot
from orbax_t5x.errors import CorruptCheckpointError, UnsafeCheckpointError, UnsupportedCheckpointError
from tests.support.t5x_steps import GOOD, array, broken, link, save, spec


@pytest.mark.parametrize(
    ("place", "target"), [("bad", "../outside"), ("bad/.zarray", "../../outside/.zarray"), ("bad/0.0", "../../secret")]
)
def test_links_out_of_the_checkpoint(step, place, target):
    save(step, spec())
    link(step / place, target)
    broken(step, UnsafeCheckpointError, "leads out")


@pytest.mark.parametrize("place", ["bad", "bad/.zarray", "bad/0.0"])
def test_dangling_links(step, place):
    save(step, spec())
    link(step / place, "nowhere")
    broken(step, CorruptCheckpointError)


@pytest.mark.parametrize("target", ["../../secret", "../../../secret"])
def test_a_link_below_a_directory_of_chunks(step, target):
    array(step / "deep", dimension_separator="/")
    save(step, spec("deep/"))
    link(step / "deep" / "0" / "0", target + "" if target.count("..") == 3 else "../" + target)
    broken(step, UnsafeCheckpointError, "leads out")


@pytest.mark.parametrize("place", ["bad/.zarray", "bad/0.0", "bad/0/0"])
def test_pipes(step, place):
    save(step, spec())
    path = step / place
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    broken(step, CorruptCheckpointError, "not a regular file|FIFO")


def test_a_pipe_or_a_directory_in_place_of_the_array(step):
    save(step, spec())
    for file in (step / "bad").iterdir():
        file.unlink()
    broken(step, CorruptCheckpointError, "missing")
    (step / "bad" / ".zarray").mkdir()
    broken(step, CorruptCheckpointError, "directory")
    (step / "bad" / ".zarray").rmdir()
    (step / "bad").rmdir()
    broken(step, CorruptCheckpointError, "missing")
    os.mkfifo(step / "bad")
    broken(step, CorruptCheckpointError)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["short", "long", "flipped", "cut", "bomb", "empty", "gone"])
def test_chunks(step, damage):
    save(step, spec())
    path = step / "bad" / "0.0"
    data = path.read_bytes()
    flipped = bytearray(data)
    flipped[-6] ^= 1  # of the crc
    new = {
        "short": gzip.compress(GOOD.tobytes()[:-1]),
        "long": gzip.compress(GOOD.tobytes() + b"\0"),
        "flipped": bytes(flipped),
        "cut": data[: len(data) // 2],
        "bomb": gzip.compress(bytes(1 << 28), 1),
        "empty": b"",
    }
    path.unlink()
    if damage in new:
        path.write_bytes(new[damage])
    broken(step, CorruptCheckpointError)


@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_uint16_is_bfloat16_in_old_versions_alone(step, version):
    bits = np.arange(6, dtype=np.uint16).reshape(2, 3)
    said = {"shape": [2, 3], "chunks": [2, 3], "dtype": "<u2", "compressor": None}
    place = {"driver": "file", "path": f"{step}/words/"}
    ts.open({"driver": "zarr", "kvstore": place, "metadata": said}, create=True).result().write(bits).result()
    leaves = {"bad": spec("words/", dtype="uint16"), "good": spec("good/")}
    tree = {"version": version, "optimizer": leaves} if version else {"target": leaves}
    (step / "checkpoint").write_bytes(flax.serialization.msgpack_serialize(tree))
    if version == 3:
        broken(step, UnsupportedCheckpointError, "uint16")
        return
    with ot.open_checkpoint(step) as checkpoint:
        lazy = checkpoint.leaves["bad" if version else "target/bad"]
        assert lazy.dtype.name == "bfloat16"
        assert lazy.get().tobytes() == bits.tobytes()


def test_two_leaves_in_one_directory(step):
    for place in ("bad/", "./bad", "bad//"):
        save(step, spec(), another=spec(place))
        with pytest.raises(CorruptCheckpointError, match="one was written over the other"):
            ot.open_checkpoint(step)
    (step / "also").symlink_to("bad")
    save(step, spec(), another=spec("also"))
    with pytest.raises(CorruptCheckpointError, match="one was written over the other"):
        ot.open_checkpoint(step)
