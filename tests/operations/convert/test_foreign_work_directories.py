"""A work directory that somebody else made, or put something into, is neither read nor followed nor emptied."""

import json
import os
import stat

import numpy as np
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.files.crc import CRC32C
from orbax_t5x.operations.convert.journal import Journal, journal_path, read_journal
from orbax_t5x.operations.convert.work_directory import WorkDirectory

ARRAYS = {"a": np.arange(3000, dtype=np.float32)}
NAMES = ["journal.1", "journal.7", "stop", "blocks", "replaced", "out", "out.orbax-checkpoint-tmp", "other"]
STRANGER = 12345

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.fixture
def home(tmp_path):
    """The user's own directory, which a planted link names."""
    (tmp_path / "home/sub").mkdir(parents=True)
    (tmp_path / "home/thesis.txt").write_text("mine")
    (tmp_path / "home/sub/y").write_text("mine")
    return tmp_path / "home"


@pytest.fixture
def source(tmp_path):
    safetensors.numpy.save_file(ARRAYS, tmp_path / "s.safetensors")
    return tmp_path / "s.safetensors"


@pytest.fixture
def work(tmp_path):
    path = tmp_path / ".out.orbax-t5x-convert"
    path.mkdir(0o700)
    return path


def link_to_directory(path, home):
    path.symlink_to(home)


def link_to_file(path, home):
    path.symlink_to(home / "thesis.txt")


def link_to_zeros(path, home):
    path.symlink_to("/dev/zero")


def dangling_link(path, home):
    path.symlink_to(home / "absent")


def fifo(path, home):
    os.mkfifo(path)


def bound_socket(path, home):
    os.mknod(path, 0o600 | stat.S_IFSOCK)


def hard_link(path, home):
    os.link(home / "thesis.txt", path)


def file_for_all(path, home):
    path.write_text("x")
    path.chmod(0o666)


def directory_for_all(path, home):
    path.mkdir()
    path.chmod(0o777)


def device(path, home):
    os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))


def file_of_a_stranger(path, home):
    path.write_text("x")
    os.chown(path, STRANGER, STRANGER)


def directory_of_a_stranger(path, home):
    path.mkdir(0o755)
    os.chown(path, STRANGER, STRANGER)


KINDS = [
    link_to_directory,
    link_to_file,
    link_to_zeros,
    dangling_link,
    fifo,
    bound_socket,
    hard_link,
    file_for_all,
    directory_for_all,
    *[pytest.param(kind, marks=needs_root) for kind in (device, file_of_a_stranger, directory_of_a_stranger)],
]


def snapshot(path):
    """Everything below a path, without following a link."""
    found = {}
    for parent, below, files in os.walk(path):
        for name in [*below, *files]:
            one = os.path.join(parent, name)
            status = os.lstat(one)
            found[one] = status.st_mode, status.st_uid, status.st_ino, status.st_mtime_ns
    return found


def assert_left_alone(source, work, home, out):
    before = snapshot(work), snapshot(home)
    assert ot.convert(source, out, format="safetensors").kept_bytes == 0
    assert (snapshot(work), snapshot(home)) == before
    assert_converted(out)
    assert not work.with_name(f"{work.name}.1").exists()


def assert_converted(out):
    np.testing.assert_array_equal(safetensors.numpy.load_file(out / "model.safetensors")["a"], ARRAYS["a"])
    found = os.lstat(out)
    assert stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(found.st_mode) == 0o777 & ~mask
    assert stat.S_IMODE(os.lstat(out / "model.safetensors").st_mode) == 0o666 & ~mask


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_no_conversion_makes_is_left_alone(kind, name, work, home, tmp_path):
    kind(work / name, home)
    before = snapshot(work), snapshot(home)
    with WorkDirectory(tmp_path / "out") as taken:
        assert taken.path == work.with_name(f"{work.name}.1")
    assert (snapshot(work), snapshot(home)) == before


@pytest.mark.parametrize("name", ["journal.1", "blocks/model.safetensors", "out/model.safetensors", "out"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_conversion_is_written_elsewhere(kind, name, source, work, home, tmp_path):
    (work / name).parent.mkdir(exist_ok=True)
    kind(work / name, home)
    assert_left_alone(source, work, home, tmp_path / "out")


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777, 0o722])
def test_a_directory_that_others_may_write_is_left_alone(mode, source, work, home, tmp_path):
    work.chmod(mode)
    assert_left_alone(source, work, home, tmp_path / "out")


@needs_root
def test_a_directory_of_somebody_else_is_left_alone(source, work, home, tmp_path):
    os.chown(work, STRANGER, STRANGER)
    assert_left_alone(source, work, home, tmp_path / "out")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in (directory_for_all,)])
def test_something_else_of_its_name_is_left_alone(kind, source, work, home, tmp_path):
    work.rmdir()
    kind(work, home)
    before = os.lstat(work), snapshot(home)
    ot.convert(source, tmp_path / "out", format="safetensors")
    assert (os.lstat(work).st_ino, snapshot(home)) == (before[0].st_ino, before[1])
    assert_converted(tmp_path / "out")


def test_with_all_names_taken_the_error_names_the_destination(source, home, tmp_path):
    for number in range(100):
        (tmp_path / f".out.orbax-t5x-convert{f'.{number}' if number else ''}").symlink_to(home)
    with pytest.raises(ot.errors.UnsafeCheckpointError, match="out") as caught:
        ot.convert(source, tmp_path / "out", format="safetensors")
    assert caught.value.path == str(tmp_path / "out")


@pytest.mark.parametrize("format", ["orbax", "safetensors"])
def test_a_killed_conversion_under_the_second_name_is_resumed(format, source, work, tmp_path):
    class Killed(BaseException):
        pass

    def killed(*_):
        raise Killed

    work.chmod(0o777)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkDirectory, "put_in_place", killed)
        patch.setattr(WorkDirectory, "__exit__", lambda work, *_: work._lock.close())
        with pytest.raises(Killed):
            ot.convert(source, tmp_path / "out", format=format)
    assert ot.convert(source, tmp_path / "out", format=format).kept_bytes == ARRAYS["a"].nbytes
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.orbax-t5x-convert", "out", "s.safetensors"]


MALFORMED = [
    b"",
    b"null",
    b"[]",
    b"{}",
    b"17",
    b'"x"',
    b"[1]",
    b"[1,2]",
    b"[1,2,3]",
    b"[1,2,[3]]",
    b"[1,2,[[]]]",
    b"[1,2,[[0,0,4]]]",
    b"[1,2,[[0,0,4,1,0,1,9]]]",
    b"[1,2,[[0,9,4,1,0,1]]]",
    b"[1,2,[[0,-1,4,1,0,1]]]",
    b"[1,2,[[0,0,4,1,0,1.5]]]",
    b"[-1,2,[]]",
    b"[true,2,[]]",
    b"[1,null,[]]",
    b'["1",2,[]]',
    b"[5,2,[]]",
    b"[0,2,[]]",
    b"[1e400,2,[]]",
    b"[NaN,2,[]]",
    b"[1" + b"0" * 30 + b",2,[]]",
    b"[1" + b"0" * 5000 + b",2,[]]",
    b"[" * 100_000,
    b"\xff\xfe",
    b'{"version":1,"conversion":"x"}',
]


def line(text, crc=None):
    return b"%08x%s\n" % (CRC32C.extend(0, text) if crc is None else crc, text)


@pytest.mark.parametrize("text", MALFORMED, ids=range(len(MALFORMED)))
def test_a_line_that_no_conversion_writes_ends_the_journal(text, tmp_path):
    good = [0, 77, [[0, 0, 4, 1, 0, 1]]], [1, 78, []]
    Journal(tmp_path, 1, "digest").close()
    path = journal_path(tmp_path, 1)
    head = path.read_bytes()
    written = [line(json.dumps(entry).encode()) for entry in good]
    path.write_bytes(head + b"".join(written))
    assert [entry.block for entry in read_journal(path, "digest", 5)] == [0, 1]
    assert [entry.block for entry in read_journal(path, "digest", 1)] == [0]
    for bad in (line(text), line(text, crc=1), text + b"\n"):
        path.write_bytes(head + written[0] + bad + written[1])
        assert [entry.block for entry in read_journal(path, "digest", 5)] == [0]
        path.write_bytes(bad + written[0])
        assert not read_journal(path, "digest", 5)


def test_a_line_without_end_is_not_read_whole(tmp_path):
    path = journal_path(tmp_path, 1)
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert read_journal(path, "digest", 5) == []
