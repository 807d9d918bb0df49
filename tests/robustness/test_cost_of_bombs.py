"""A guard against bombs: what small hostile files of each format cost a process, in processor time and in memory.

The promise is 2 seconds and 256 MiB beyond the file's own size; the time here is a guard against hangs, several times
that, and of the process alone, so that a busy machine changes nothing.
"""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support.bundle_writer import bundle_of, entry
from tests.support.gguf_files import F32, header, pair, tensor
from tests.support.hostile_files import huge_chunk
from tests.support.torch_files import archive
from tests.support.zip_files import Entry, archive_of

pytestmark = pytest.mark.slow

_MIB = 1 << 20
GOOD = np.arange(6, dtype=np.float32)
_MOST_SECONDS = 10
_MOST_BYTES = 256 * _MIB


def header_of_objects(directory: Path) -> None:
    empty = b",".join([b"{}"] * (10 * _MIB))
    header = b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"__metadata__":{"b":[' + empty + b"]}}"
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


def header_of_one_key(directory: Path) -> None:
    header = b"{" + b",".join(b'"k%d":0' % i for i in range(200_000)) + b',"k199999":0}'
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


def strings_over_a_hole(directory: Path) -> None:
    count = 200_000_000
    bundle = bundle_of({"good": GOOD})
    bundle.entries[b"a"] = entry(7, (count,), offset=GOOD.nbytes, size=count + 4)
    os.truncate(f"{bundle.write(directory)}.data-00000-of-00001", GOOD.nbytes + count + 4)


def newlines(directory: Path) -> None:
    bundle_of({"a": GOOD}).write(directory)
    (directory / "checkpoint").write_bytes(b"\n" * _MIB)


def wide_shape(directory: Path) -> None:
    shape = ",".join(["1000000000000"] * 500_000)
    header = b'{"a":{"dtype":"F32","shape":[%s],"data_offsets":[0,0]}}' % shape.encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


def long_key(directory: Path) -> None:
    """A key of 100 KB above as many values."""
    (directory / "config.json").write_text("{}")
    key = b"\xdb" + struct.pack(">I", 100_000) + b"k" * 100_000
    (directory / "flax_model.msgpack").write_bytes(
        b"\x81" + key + b"\xdd" + struct.pack(">I", 100_000) + bytes(100_000)
    )


def shared_keys(directory: Path) -> None:
    """A table of keys of 100 KB of which each repeats the one before."""
    bundle = bundle_of({"a": GOOD})
    bundle.entries |= {b"k" * 100_000 + b"%06d" % number: entry(4, (0,)) for number in range(4_000)}
    (directory / "m.index").write_bytes(bundle.index())


def wide_list_of_members(directory: Path) -> None:
    (directory / "a.npz").write_bytes(archive_of([Entry(b"%x.npy" % number, b"") for number in range(60_000)], count=0))


# Name -> what writes it, and what reading everything gives.
BOMBS: dict[str, tuple[Callable[[Path], object], str]] = {
    "JSON of empty objects": (header_of_objects, "LimitExceededError"),
    "a shape of 500,000 dimensions": (wide_shape, "LimitExceededError"),
    "JSON with a key twice, of many": (header_of_one_key, "CorruptCheckpointError"),
    "strings over a hole": (strings_over_a_hole, "LimitExceededError"),
    "a state of newlines": (newlines, "read"),
    "msgpack that claims 4 G keys": (
        lambda path: (path / "checkpoint").write_bytes(b"\x82\xa7version\x03\xa9optimizer\xdf" + b"\xff" * 4),
        "CorruptCheckpointError",
    ),
    "msgpack, deep": (
        lambda path: (path / "checkpoint").write_bytes(b"\x81\xa1a" * 300_000 + b"\xc0"),
        "LimitExceededError",
    ),
    "msgpack of five million nils": (
        lambda path: (path / "checkpoint_1").write_bytes(b"\x81\xa1a\xdd\x00\x4c\x4b\x40" + b"\xc0" * 5_000_000),
        "LimitExceededError",
    ),
    "msgpack of names under a long key": (long_key, "LimitExceededError"),
    "keys that share their beginning": (shared_keys, "LimitExceededError"),
    "a pickle of five million lists": (
        lambda path: (path / "model.pt").write_bytes(archive(b"\x80\x02" + b"]" * 5_000_000 + b".", {})),
        "LimitExceededError",
    ),
    "a ZIP of another count": (wide_list_of_members, "CorruptCheckpointError"),
    "GGUF of two million pairs": (
        lambda path: (path / "a.gguf").write_bytes(header([tensor("a", (1,), F32, 0)], [pair("k", True)] * 2_000_001)),
        "LimitExceededError",
    ),
    **{
        f"a chunk of 10 GiB, {kind}": (
            lambda path, kind=kind: huge_chunk(path / "step", kind, 10 << 30),
            "LimitExceededError",
        )
        for kind in ("zarr2", "zarr3", "ocdbt", "t5x")
    },
}

CHILD = """
import json, sys, time
import orbax_t5x as ot

def memory(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))

paths = json.loads(sys.argv[1])
ot.restore(paths.pop("sound"), None)  # what is made once is there
said = {}
for name, path in paths.items():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak is what there is now
    before, begun = memory("VmRSS"), time.process_time()
    try:
        with ot.open_checkpoint(path) as checkpoint:
            checkpoint.leaves["a"][:1].get()
            ot.restore(checkpoint, None)
        outcome = "read"
    except ot.errors.CheckpointError as error:
        outcome = type(error).__name__
    said[name] = outcome, time.process_time() - begun, memory("VmHWM") - before
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> dict[str, tuple[str, float, int]]:
    """Outcome, processor seconds and peak growth of memory, by name."""
    root = tmp_path_factory.mktemp("bombs")
    (root / "sound").mkdir()
    bundle_of({"a": GOOD}).write(root / "sound")
    paths = {"sound": str(root / "sound")}
    for number, (name, (write, _)) in enumerate(BOMBS.items()):
        directory = root / str(number)
        directory.mkdir()
        write(directory)
        files = list(directory.iterdir())
        paths[name] = str(files[0] if len(files) == 1 and files[0].name != "checkpoint" else directory)
    arguments = [sys.executable, "-c", CHILD, json.dumps(paths)]
    run = subprocess.run(arguments, capture_output=True, text=True, timeout=800)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_costs_little(name, said):
    outcome, seconds, grown = said[name]
    assert outcome == BOMBS[name][1]
    assert seconds < _MOST_SECONDS and grown < _MOST_BYTES
