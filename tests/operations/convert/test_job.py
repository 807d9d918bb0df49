"""A conversion that was killed starts again, and one that has no room does not start."""

import errno
import shutil

import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointError, CheckpointIOError
from orbax_t5x.lazy.read_stats import ReadStats
from tests.support import torch_files
from tests.support.killed_blocks import ARRAYS, assert_holds, convert, leave, work_of


@pytest.mark.parametrize("format", ["orbax", "safetensors"])
def test_a_killed_conversion_starts_again(source, out, format, monkeypatch):
    """Whatever formats the killed ones had, all is read again, and nothing stays of what they left."""
    for blocks, killed_format in ((3, format), (5, "orbax"), (4, "safetensors")):
        leave(source, out, blocks=blocks, format=killed_format)
        with pytest.raises(CheckpointError):
            ot.open_checkpoint(work_of(out))
    read = []
    count = ReadStats.count
    monkeypatch.setattr(
        ReadStats, "count", lambda stats, nbytes, *more: read.append(nbytes) or count(stats, nbytes, *more)
    )
    report = convert(source, out, format=format)
    assert sum(read) == report.bytes == sum(array.nbytes for array in ARRAYS.values())
    assert_holds(out, format, ARRAYS)
    assert not list(out.rglob("*.__lock"))


@pytest.mark.parametrize("format", ["orbax", "safetensors"])
def test_more_than_the_disk_can_hold_is_refused_before_the_first_block(tmp_path, format):
    """An expanded tensor of PyTorch, 32 times what is free: Orbax's compression is taken for twentyfold at most."""
    size = 8 * shutil.disk_usage(tmp_path).free
    pickled = torch_files.pickled({"w": torch_files.SavedTensor("0", "float32", 1, 0, (size,), (0,))})
    (tmp_path / "w.bin").write_bytes(torch_files.archive(pickled, {"0": b"\0\0\x80?"}))
    with pytest.raises(CheckpointIOError, match=r"[KMGTP]iB are to be written, but .* free in") as caught:
        ot.convert(tmp_path / "w.bin", tmp_path / "new" / "out", format=format)
    assert caught.value.errno == errno.ENOSPC and caught.value.fix is not None
    assert [path.name for path in tmp_path.iterdir()] == ["w.bin"]
