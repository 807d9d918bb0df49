"""ZIP archives: those that Python's zipfile writes are read, and one that has two readings is refused."""

import io
import zipfile
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbax_t5x.errors import (
    CheckpointError,
    CorruptCheckpointError,
    LimitExceededError,
    UnsafeCheckpointError,
    UnsupportedCheckpointError,
)
from orbax_t5x.files.limits import Limits
from orbax_t5x.files.local import LocalFiles
from orbax_t5x.readers.zip_leaf import ZipLeaf
from orbax_t5x.readers.zip_members import Archive
from orbax_t5x.testing.leaf_reads import read_boxes
from tests.support.zip_files import Entry, archive_of, sizes_64

A, B = Entry(b"m/a", b"12345"), Entry(b"m/b", b"")
FULL = 0xFFFFFFFF


def open_bytes(directory, data, **limits):
    (directory / "file").write_bytes(data)
    return Archive(LocalFiles(directory, limits=Limits(**limits)).file("file"))


def contents(archive):
    found = {}
    for name, member in archive.members.items():
        found[name] = archive.read(name, 1 << 20, "")
        assert found[name] == bytes(archive.file.read(archive.start_of(name), member.size))
    return found


@pytest.mark.slow
@given(
    st.dictionaries(
        st.text("abé/ _.", min_size=1, max_size=6).filter(lambda name: name[0] != "/"), st.binary(max_size=40)
    ),
    st.booleans(),
)
@settings(max_examples=settings.default.max_examples // 4)
def test_what_zipfile_writes(tmp_path_factory, members, wide):
    made = io.BytesIO()
    names = [name for name in members if ".." not in name.split("/") and not name.endswith("/")]
    with zipfile.ZipFile(made, "w") as file:
        for name in names:
            with file.open(name, "w", force_zip64=wide) as member:
                member.write(members[name])
    archive = open_bytes(tmp_path_factory.mktemp("zip"), made.getvalue())
    assert contents(archive) == {name: members[name] for name in names}
    assert archive.index_bytes <= len(made.getvalue()) + sum(map(len, members.values()))


def test_what_is_written_here_is_right(tmp_path):
    """By the oracle: zipfile reads all of these."""
    sound = {
        "plain": archive_of([A, B]),
        "the ZIP64 record": archive_of([A, B], zip64={}),
        "a full record": archive_of([A, B], zip64={}, here=0xFFFF, count=0xFFFF, size=FULL, start=FULL),
        "full sizes": archive_of(
            [Entry(b"m/a", b"12345", 0, 0, FULL, FULL, extra=sizes_64(5, 5), local_extra=sizes_64(5, 5))]
        ),
        "a full offset": archive_of([Entry(b"m/a", b"12345", header=FULL, extra=b"XX\1\0x" + sizes_64(0))]),
        "padding": archive_of([Entry(b"m/a", b"12345", local_extra=b"FB\7\0ZZZZZZZ")]),
    }
    for kind, data in sound.items():
        with zipfile.ZipFile(io.BytesIO(data)) as theirs:
            expected = {name: theirs.read(name) for name in theirs.namelist()}
        assert contents(open_bytes(tmp_path, data)) == expected != {}, kind


DAMAGED = {
    "empty": b"",
    "a header alone": b"PK\3\4",
    "cut": archive_of([A, B])[:-1],
    "something before, which all offsets know": archive_of(
        [Entry(b"m/a", b"x", header=3)], before=b"xyz", start=37 - 5
    ),
    "something after": archive_of([A], after=b"x"),
    "a comment": archive_of([A])[:-2] + b"\1\0x",
    "a count too many": archive_of([A], here=2, count=2),
    "a count too few": archive_of([A, B], here=1, count=1),
    "a name twice": archive_of([A, A]),
    "encrypted": archive_of([Entry(b"m/a", b"12345", flags=1)]),
    "another name": archive_of([Entry(b"m/a", b"12345", local_name=b"m/b")]),
    "a longer name": archive_of([Entry(b"m/a", b"12345", local_name=b"m/ab")]),
    "another method": archive_of([Entry(b"m/a", b"12345", local_method=8)]),
    "another crc": archive_of([Entry(b"m/a", b"12345", local_crc=7)]),
    "a wrong crc": archive_of([Entry(b"m/a", b"12345", crc=7)]),
    "deflated": archive_of([Entry(b"m/a", b"12345", method=8)]),
    "sizes that differ": archive_of([Entry(b"m/a", b"12345", size=6)]),
    "members that overlap": archive_of([A, Entry(b"m/b", b"12", header=10)]),
    "one place for two": archive_of([A, Entry(b"m/b", b"12345", header=0)]),
    "a member in the directory": archive_of([Entry(b"m/a", b"12345", size=60, stored=60)]),
    "a header behind the end": archive_of([Entry(b"m/a", b"12345", header=10_000)]),
    "a directory elsewhere": archive_of([A], start=0),
    "a directory of another size": archive_of([A], size=10),
    "a name that is no UTF-8": archive_of([Entry(b"m/\xff", b"", flags=0x800)]),
    "a ZIP64 record that contradicts": archive_of([A], zip64={"start": 0}, start=38),
    "full sizes without a field": archive_of([Entry(b"m/a", b"12345", 0, 0, FULL, FULL)]),
    "half a field": archive_of([Entry(b"m/a", b"12345", 0, 0, FULL, FULL, extra=sizes_64(5), local_extra=sizes_64(5))]),
    "sizes of 2**60": archive_of(
        [Entry(b"m/a", b"1", 0, 0, FULL, FULL, extra=sizes_64(1 << 60, 1 << 60), local_extra=sizes_64(1, 1))]
    ),
}


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED.keys())
def test_damaged_archives(tmp_path, data):
    with pytest.raises(CorruptCheckpointError) as caught:
        contents(open_bytes(tmp_path, data))
    assert caught.value.path == str(tmp_path / "file")


@pytest.mark.parametrize("name", [b"/etc/passwd", b"../x", b"m/../../x", b"m\\x", b"", b"m/\0"])
def test_names_that_lead_out(tmp_path, name):
    with pytest.raises(UnsafeCheckpointError):
        open_bytes(tmp_path, archive_of([Entry(name, b"x")]))


def test_limits(tmp_path):
    data = archive_of([A, B])
    for limits in ({"entries": 1}, {"index_bytes": 60}):
        with pytest.raises(LimitExceededError):
            open_bytes(tmp_path, data, **limits)
    with pytest.raises(LimitExceededError, match="over a bound"):
        open_bytes(tmp_path, data).read("m/a", 4, "a bound")


def test_an_error_in_a_member_names_the_leaf(tmp_path):
    archive = open_bytes(tmp_path, DAMAGED["another name"])
    leaf = ZipLeaf("the/leaf", archive, "m/a", 0, (5,), (1,), np.dtype(np.uint8))
    for verify in ("off", "full"):
        with pytest.raises(CorruptCheckpointError, match="another name") as caught:
            read_boxes(leaf, None, verify)
        assert caught.value.leaf == "the/leaf"


def test_no_checksums(tmp_path):
    data = archive_of([Entry(b"m/a", b"12345", crc=0), Entry(b"m/b", b"x", crc=0)])
    assert {member.crc for member in open_bytes(tmp_path, data).members.values()} == {None}
    data = archive_of([Entry(b"m/a", b"12345", crc=0), Entry(b"m/b", b"x")])
    assert [member.crc for member in open_bytes(tmp_path, data).members.values()] == [0, zlib.crc32(b"x")]


def test_a_pointer_of_git_lfs(tmp_path):
    with pytest.raises(UnsupportedCheckpointError, match="git lfs pull"):
        open_bytes(tmp_path, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


@pytest.mark.slow
def test_every_changed_byte_of_the_headers(tmp_path):
    """Each is an error, or changes nothing that is read."""
    sound = archive_of([A, Entry(b"m/c", b"6789")], zip64={})
    for at in range(len(sound)):
        for bits in (1, 0x80, 0xFF):
            data = bytearray(sound)
            data[at] ^= bits
            try:
                found = contents(open_bytes(tmp_path, bytes(data)))
            except CheckpointError as error:
                assert error.path == str(tmp_path / "file")
            else:
                assert sorted(found.values()) == [b"12345", b"6789"], at


def test_a_large_directory_is_read_in_little_time(tmp_path):
    entries = [Entry(b"%x" % number, b"") for number in range(5_000)]
    assert len(open_bytes(tmp_path, archive_of(entries, here=5_000, count=5_000)).members) == 5_000
