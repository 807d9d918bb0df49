"""Damaged and hostile OCDBT databases: the saved values or a typed error, nothing else."""

import hashlib
import os
import shutil
import struct

import cramjam
import google_crc32c
import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CorruptCheckpointError, UnsafeCheckpointError
from tests.support.orbax_items import files_of, outcome, right_or

pytestmark = pytest.mark.usefixtures("quiet_logs")


def tree_hash(directory):
    """Every name and every byte below a directory."""
    digest = hashlib.sha256()
    for parent, directories, files in sorted(os.walk(directory)):
        directories.sort()
        for name in sorted(files):
            path = os.path.join(parent, name)
            digest.update(path.encode())
            if os.path.isfile(path) and not os.path.islink(path):
                with open(path, "rb") as file:
                    digest.update(file.read())
    return digest.hexdigest()


def test_the_good_ones(item):
    for ocdbt in (True, False):
        for zarr3 in (True, False):
            path = item(ocdbt=ocdbt, zarr3=zarr3)
            before = tree_hash(path)
            assert not right_or((), outcome(path))
            assert tree_hash(path) == before, "reading wrote something"


@pytest.mark.parametrize("size", [0, 1, "half", -1])
@pytest.mark.parametrize("zarr3", [True, False])
def test_files_cut(item, size, zarr3):
    for file in files_of(item(zarr3=zarr3)):
        path = item(zarr3=zarr3)
        whole = os.path.getsize(file)
        os.truncate(file, {"half": whole // 2, -1: max(whole - 1, 0)}.get(size, size) if size != 1 else min(1, whole))
        wrong = right_or((CorruptCheckpointError,), outcome(path))
        relative = os.path.relpath(file, path)
        if relative in ("manifest.ocdbt", "_METADATA") or relative.startswith("d/"):
            assert wrong == {None}


@pytest.mark.parametrize("zarr3", [True, False])
def test_files_missing(item, zarr3):
    damaged = set()
    for file in files_of(item(zarr3=zarr3)):
        path = item(zarr3=zarr3)
        os.remove(file)
        if os.path.relpath(file, path) == "_METADATA":
            with pytest.raises(CorruptCheckpointError, match="_METADATA is missing"):
                ot.open_checkpoint(path)
            continue
        if os.path.relpath(file, path) == "manifest.ocdbt":
            with pytest.raises(CorruptCheckpointError, match=r"manifest\.ocdbt is missing"):
                ot.open_checkpoint(path)
            continue
        damaged |= right_or((CorruptCheckpointError,), outcome(path))
    assert {"a", "b/c"} <= damaged, "a missing data file names its leaf"


def test_flips_in_manifest_and_tree(item):
    """Both carry a crc32c: a flipped bit never gives another value."""
    path = item()
    (node,) = os.listdir(path / "d")
    rng = np.random.default_rng(0)
    for file in (path / "manifest.ocdbt", path / "d" / node):
        content = file.read_bytes()
        for position in rng.integers(0, len(content), 40):
            changed = bytearray(content)
            changed[position] ^= 1 << int(rng.integers(8))
            file.write_bytes(changed)
            assert right_or((CorruptCheckpointError,), outcome(path)), (file, position)
        file.write_bytes(content)
    assert not right_or((), outcome(path))


def sealed(body):
    """A manifest with this body, uncompressed, and a checksum that holds."""
    content = bytes.fromhex("0cdb3a2a") + struct.pack("<Q", 14 + len(body) + 4) + bytes(2) + body
    return content + struct.pack("<I", google_crc32c.value(content))


@pytest.mark.parametrize(
    ("reference", "base_length"),
    [("../out/", 7), ("../out/", 0), ("d/../../out/", 0), ("{root}/out/", 0), ("{root}/out/", None), ("d/./", 0)],
)
def test_a_reference_out_of_the_directory(item, tmp_path, reference, base_length):
    """The manifest names the file of the root node; one that leads out is refused, though the file is there."""
    path = item()
    (node,) = os.listdir(path / "d")
    body = bytes(cramjam.zstd.decompress((path / "manifest.ocdbt").read_bytes()[14:-4]))
    real = f"d/{node}".encode()
    (path / "manifest.ocdbt").write_bytes(sealed(body))
    assert not right_or((), outcome(path)), "the manifest is made right"
    start = reference.format(root=tmp_path)
    name = start + "x" * 34
    assert body.count(bytes([len(real), 0]) + real) == 1
    hostile = bytes([len(name), len(start) if base_length is None else base_length]) + name.encode()
    (path / "manifest.ocdbt").write_bytes(sealed(body.replace(bytes([len(real), 0]) + real, hostile)))
    target = os.path.normpath(os.path.join(path, name))
    os.makedirs(os.path.dirname(target), exist_ok=True)
    shutil.move(path / "d" / node, target)
    result = outcome(path)
    assert isinstance(result[None], UnsafeCheckpointError)
