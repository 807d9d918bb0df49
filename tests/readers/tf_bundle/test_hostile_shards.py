"""Shards that are missing, swapped, cut, damaged or no files at all."""

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from orbax_t5x.errors import CheckpointError, CorruptCheckpointError, UnsafeCheckpointError
from orbax_t5x.readers.tf_bundle.open import open_tf_bundle
from orbax_t5x.testing.leaf_reads import leaf_of, read_boxes, read_whole, same_bits
from tests.support.bundle_damage import GOOD, VALUE, costs_one_leaf
from tests.support.bundle_writer import Bundle, bundle_of, shard_path


def fifo(path: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(path.parent)
        try:
            server.bind(path.name)
        finally:
            os.chdir(here)


def link_outside(path: Path) -> None:
    secret = path.parent.parent / "secret"
    secret.write_bytes(bytes(1000))
    path.symlink_to(secret)


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda path: None, CorruptCheckpointError, "the shard is missing"),
        (lambda path: path.mkdir(), CorruptCheckpointError, "a directory"),
        (fifo, CorruptCheckpointError, "a FIFO"),
        (unix_socket, CorruptCheckpointError, "a socket"),
        (lambda path: path.symlink_to("/dev/zero"), UnsafeCheckpointError, "leads out"),
        (lambda path: path.symlink_to("../../../../../etc/passwd"), UnsafeCheckpointError, "leads out"),
        (link_outside, UnsafeCheckpointError, "leads out"),
        (lambda path: path.symlink_to("nothing"), CorruptCheckpointError, "dangling"),
        (lambda path: path.symlink_to(path.name), CorruptCheckpointError, "circle"),
        (lambda path: path.write_bytes(b""), CorruptCheckpointError, "of a shard of 0"),
    ],
)
def test_shards(tmp_path: Path, make: Callable[[Path], None], kind: type[CheckpointError], text: str) -> None:
    (tmp_path / "run").mkdir()
    bundle = Bundle(2)
    bundle.add("good", GOOD, 0)
    bundle.add("bad", VALUE, 1)
    prefix = bundle.write(tmp_path / "run")
    shard_path(prefix, 1, 2).unlink()
    make(shard_path(prefix, 1, 2))
    error = costs_one_leaf(prefix, kind, text)
    assert error.path == str(shard_path(prefix, 1, 2))


def test_an_index_that_is_a_fifo_or_a_link_outside(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    prefix = tmp_path / "run/model.ckpt-1"
    fifo(Path(f"{prefix}.index"))
    with pytest.raises(CorruptCheckpointError, match="a FIFO"):
        open_tf_bundle(prefix)
    Path(f"{prefix}.index").unlink()
    link_outside(Path(f"{prefix}.index"))
    with pytest.raises(UnsafeCheckpointError, match="leads out"):
        open_tf_bundle(prefix)


def test_a_checkpoint_file_that_is_a_fifo(tmp_path: Path) -> None:
    bundle_of({"x": VALUE}).write(tmp_path)
    fifo(tmp_path / "checkpoint")
    with pytest.raises(CorruptCheckpointError, match="a FIFO"):
        open_tf_bundle(tmp_path)


def two_shards(directory: Path, seed: int, rows: int = 50) -> tuple[Path, dict[str, np.ndarray]]:
    directory.mkdir(exist_ok=True)
    random = np.random.default_rng(seed)
    arrays = {"a": random.random((rows, 4), np.float32), "b": random.random((rows, 4), np.float32)}
    bundle = Bundle(2)
    bundle.add("a", arrays["a"], 0)
    bundle.add("b", arrays["b"], 1)
    return bundle.write(directory), arrays


def test_swapped_shards_fail_their_checksums(tmp_path: Path) -> None:
    prefix, _ = two_shards(tmp_path, 0)
    one, two = shard_path(prefix, 0, 2), shard_path(prefix, 1, 2)
    one.rename(tmp_path / "x")
    two.rename(one)
    (tmp_path / "x").rename(two)
    with open_tf_bundle(prefix) as checkpoint:
        for name in "ab":
            with pytest.raises(CorruptCheckpointError, match=r"have the crc32c 0x[0-9a-f]{8}, stored is 0x[0-9a-f]{8}"):
                read_boxes(leaf_of(checkpoint, name))


@pytest.mark.parametrize("rows", [50, 80])
def test_a_shard_of_another_step(tmp_path: Path, rows: int) -> None:
    """A longer one passes the look at its size, and fails its checksum."""
    prefix, arrays = two_shards(tmp_path / "one", 0)
    other, _ = two_shards(tmp_path / "two", 1, rows)
    shutil.copy(shard_path(other, 1, 2), shard_path(prefix, 1, 2))
    with open_tf_bundle(prefix) as checkpoint:
        assert same_bits(read_whole(leaf_of(checkpoint, "a")), arrays["a"])
        with pytest.raises(CorruptCheckpointError, match="crc32c"):
            read_boxes(leaf_of(checkpoint, "b"))


def test_a_shorter_shard_is_found_at_opening(tmp_path: Path) -> None:
    prefix, arrays = two_shards(tmp_path, 0)
    os.truncate(shard_path(prefix, 1, 2), 799)
    with open_tf_bundle(prefix) as checkpoint:
        error = leaf_of(checkpoint, "b").error
        assert isinstance(error, CorruptCheckpointError) and "bytes 0 to 800 of a shard of 799" in str(error)
        assert same_bits(read_whole(leaf_of(checkpoint, "a")), arrays["a"])


def test_flips_and_zeroed_pages_in_the_data(tmp_path: Path) -> None:
    array = np.random.default_rng(0).random((64, 100), np.float32)
    prefix = bundle_of({"w": array}).write(tmp_path)
    data = shard_path(prefix).read_bytes()
    damages = [bytes([*data[:n], data[n] ^ 1 << n % 8, *data[n + 1 :]]) for n in (0, 777, len(data) - 1)]
    damages.append(data[:4096] + bytes(4096) + data[8192:])
    for damaged in damages:
        shard_path(prefix).write_bytes(damaged)
        with open_tf_bundle(prefix) as checkpoint:
            leaf = leaf_of(checkpoint, "w")
            halves = [((0, 32), (0, 100)), ((32, 64), (0, 100))]
            columns = [((0, 64), (0, 50)), ((0, 64), (50, 100))]
            for boxes in (None, halves, columns):
                with pytest.raises(CorruptCheckpointError, match="crc32c") as caught:
                    read_boxes(leaf, boxes)
                assert caught.value.leaf == "w" and caught.value.path == str(shard_path(prefix))
            with pytest.raises(CorruptCheckpointError, match="crc32c"):
                read_boxes(leaf, halves[:1], "full")
            assert read_boxes(leaf, halves[:1]).verified is False
            assert read_boxes(leaf, verify="off").verified is None
