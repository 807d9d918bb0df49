"""Names from files stay inside the root, whatever stands there."""

import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbax_t5x.errors import (
    CheckpointError,
    CheckpointIOError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsafeCheckpointError,
)
from orbax_t5x.files import paths
from orbax_t5x.files.paths import Descriptor, Root, split_name

BLOB = "0123456789abcdef" * 4


def opened(root: Root, name: str) -> bytes:
    file, found = root.open(name, leaf="x")
    with file:
        assert os.fstat(file.number).st_ino == found.st_ino == root.stat(name).st_ino
        return os.pread(file.number, 100, 0)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """root/{a, d/b}, and a secret beside the root."""
    (tmp_path / "root/d").mkdir(parents=True)
    (tmp_path / "root/a").write_bytes(b"a")
    (tmp_path / "root/d/b").write_bytes(b"b")
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "root2").mkdir()
    (tmp_path / "root2/c").write_bytes(b"secret")
    return tmp_path / "root"


@pytest.mark.parametrize(
    "name", ["", "/etc/passwd", "..", "../secret", "d/../../secret", "d/..", "a\0b", "d\\..\\..\\secret", "a\ud800b"]
)
def test_names_that_lead_out_are_unsafe(tree: Path, name: str) -> None:
    with pytest.raises(UnsafeCheckpointError) as caught:
        Root(tree).open(name, leaf="x")
    assert caught.value.leaf == "x" and caught.value.path == str(tree)


def test_names_inside(tree: Path) -> None:
    root = Root(tree)
    assert opened(root, "a") == b"a"
    assert opened(root, "./d//b") == b"b"
    assert root.locate("d/b") == str(tree / "d/b")
    assert root.locate("d") == str(tree / "d")
    assert split_name("a/..b/c..") == ["a", "..b", "c.."]


def test_the_callers_path_is_trusted_and_resolved_once(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tree)
    root = Root(tmp_path / "link")
    assert root.path == str(tree)
    assert opened(root, "a") == b"a"


@pytest.mark.parametrize(
    ("link", "target", "name"),
    [
        ("l", "a", "l"),
        ("l", "d/b", "l"),
        ("l", "d/../a", "l"),
        ("d/l", "../a", "d/l"),
        ("l", "d", "l/b"),
        ("l", "{root}/d/b", "l"),
        ("l", "{root}/d", "l/b"),
        ("l", "./d/./b", "l"),
    ],
)
def test_symlinks_inside_are_followed(tree: Path, link: str, target: str, name: str) -> None:
    (tree / link).symlink_to(target.format(root=tree))
    assert opened(Root(tree), name) in (b"a", b"b")
    assert Root(tree).locate(name) == os.path.realpath(tree / name)


@pytest.mark.parametrize(
    ("link", "target", "name"),
    [
        ("l", "../secret", "l"),
        ("l", "{root}/../secret", "l"),
        ("l", "{root}2/c", "l"),
        ("l", "..", "l/secret"),
        ("l", "/", "l/etc/passwd"),
        ("l", "/dev/zero", "l"),
        ("d/l", "../../root2", "d/l/c"),
        ("l", "/proc/self/fd", "l/0"),
    ],
)
def test_symlinks_that_lead_out_are_unsafe(tree: Path, link: str, target: str, name: str) -> None:
    (tree / link).symlink_to(target.format(root=tree))
    for use in (Root(tree).open, Root(tree).stat, Root(tree).locate):
        with pytest.raises(UnsafeCheckpointError, match="leads out"):
            use(name)


def test_a_chain_of_links_is_followed_to_where_it_leads_out(tree: Path) -> None:
    (tree / "one").symlink_to("two")
    (tree / "two").symlink_to("d/three")
    (tree / "d/three").symlink_to("../a")
    assert opened(Root(tree), "one") == b"a"
    (tree / "d/three").unlink()
    (tree / "d/three").symlink_to("../../secret")
    with pytest.raises(UnsafeCheckpointError):
        Root(tree).open("one")


def test_a_link_that_climbs_out_and_comes_back_is_followed(tree: Path) -> None:
    (tree / "l").symlink_to("../root/a")
    assert opened(Root(tree), "l") == b"a"


def test_dangling_and_circular_links_are_corrupt(tree: Path) -> None:
    (tree / "dangling").symlink_to("nothing")
    (tree / "one").symlink_to("two")
    (tree / "two").symlink_to("one")
    with pytest.raises(CorruptCheckpointError, match="dangling"):
        Root(tree).open("dangling")
    with pytest.raises(CorruptCheckpointError, match="circle"):
        Root(tree).open("one")


def test_a_missing_file_is_not_found(tree: Path) -> None:
    for name in ("nothing", "nothing/b", "d/nothing", "a/b"):
        with pytest.raises(CheckpointNotFoundError):
            Root(tree).open(name)
    with pytest.raises(CheckpointNotFoundError):
        Root(tree / "nothing").open("a")


def test_what_is_no_regular_file_is_refused_at_once(tree: Path) -> None:
    os.mkfifo(tree / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(tree)  # the path of a socket has at most 107 bytes
        try:
            server.bind("socket")
        finally:
            os.chdir(here)
        for name, kind in (("fifo", "a FIFO"), ("socket", "socket"), ("d", "directory")):
            for use in (Root(tree).open, Root(tree).stat):
                with pytest.raises(CorruptCheckpointError, match=kind):
                    use(name)


def test_a_name_too_long_for_the_file_system(tree: Path) -> None:
    with pytest.raises(CorruptCheckpointError, match="too long"):
        Root(tree).open("n" * 300)


def test_an_error_of_the_operating_system_keeps_its_errno(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "lstat", refuse)
    with pytest.raises(CheckpointIOError, match="Permission denied") as caught:
        Root(tree).open("a", leaf="x")
    assert caught.value.errno == 13 and caught.value.leaf == "x"


class TestHubCache:
    """A snapshot of the Hugging Face hub cache is links to blobs of its own model."""

    @pytest.fixture
    def snapshot(self, tmp_path: Path) -> Path:
        model = tmp_path / "models--org--t5"
        (model / "blobs").mkdir(parents=True)
        (model / "blobs" / BLOB).write_bytes(b"blob")
        (tmp_path / "models--org--other/blobs").mkdir(parents=True)
        (tmp_path / "models--org--other/blobs" / BLOB).write_bytes(b"other")
        snapshot = model / "snapshots/rev"
        (snapshot / "sub").mkdir(parents=True)
        return snapshot

    def test_blobs_are_read(self, snapshot: Path) -> None:
        (snapshot / "a").symlink_to(f"../../blobs/{BLOB}")
        (snapshot / "sub/a").symlink_to(f"../../../blobs/{BLOB}")
        assert opened(Root(snapshot), "a") == b"blob"
        assert opened(Root(snapshot), "sub/a") == b"blob"
        assert opened(Root(snapshot / "sub"), "a") == b"blob"

    @pytest.mark.parametrize(
        "target",
        [
            f"../../../models--org--other/blobs/{BLOB}",
            "../../blobs/config.json",
            f"../../blobs/{BLOB}/../{BLOB[:40]}",
            f"../../refs/{BLOB}",
            "../../blobs",
        ],
    )
    def test_nothing_else_is(self, snapshot: Path, target: str) -> None:
        (snapshot.parent.parent / "blobs/config.json").write_bytes(b"x")
        (snapshot / "a").symlink_to(target)
        with pytest.raises((UnsafeCheckpointError, CheckpointNotFoundError, CorruptCheckpointError)):
            Root(snapshot).open("a")

    def test_a_blob_is_no_link(self, snapshot: Path, tmp_path: Path) -> None:
        (tmp_path / "secret").write_bytes(b"secret")
        link = BLOB[:40]
        (snapshot.parent.parent / "blobs" / link).symlink_to(tmp_path / "secret")
        (snapshot / "a").symlink_to(f"../../blobs/{link}")
        with pytest.raises(UnsafeCheckpointError):
            Root(snapshot).open("a")

    def test_only_for_a_snapshot(self, snapshot: Path, tmp_path: Path) -> None:
        plain = tmp_path / "plain/x/y"
        plain.mkdir(parents=True)
        (plain / "a").symlink_to(snapshot.parent.parent / "blobs" / BLOB)
        with pytest.raises(UnsafeCheckpointError):
            Root(plain).open("a")


PARTS = st.sampled_from(["a", "b", "c", "d", "..", ".", ""])
NAMES = st.lists(PARTS, min_size=1, max_size=5).map("/".join)


@given(
    links=st.lists(
        st.tuples(st.lists(st.sampled_from("abcd"), min_size=1, max_size=3), st.booleans(), NAMES), max_size=6
    ),
    files=st.lists(st.lists(st.sampled_from("abcd"), min_size=1, max_size=3), max_size=6),
    names=st.lists(NAMES, min_size=1, max_size=6),
)
def test_no_tree_of_links_leads_out(tmp_path_factory: pytest.TempPathFactory, links, files, names) -> None:
    """What opens lies inside; what the kernel finds inside opens."""
    outer = tmp_path_factory.mktemp("outer")
    root = outer / "root"
    for directory in (outer, root):
        (directory / "a").mkdir(parents=True, exist_ok=True)
        (directory / "a/a").write_bytes(b"")
        (directory / "b").write_bytes(b"")
    for parts in files:
        make(root.joinpath(*parts), lambda path: path.write_bytes(b""))
    for parts, absolute, target in links:
        text = f"{root}/{target}" if absolute else target
        if text:
            make(root.joinpath(*parts), lambda path, text=text: path.symlink_to(text))
    for name in names:
        real = os.path.realpath(root / name)
        inside = real.startswith(f"{root}/") and os.path.isfile(root / name)
        try:
            file, found = Root(root).open(name)
            file.close()
        except CheckpointError:
            if inside and name and ".." not in name.split("/") and name[0] != "/" and not name.endswith(("/", "/.")):
                raise
        else:
            assert real.startswith(f"{root}/") and os.path.samestat(found, os.stat(real))


def make(path: Path, create) -> None:
    """Creates a file or a link unless something is in the way; never through a link."""
    for parent in reversed(path.parents):
        if parent.is_symlink() or (parent.exists() and not parent.is_dir()):
            return
        parent.mkdir(exist_ok=True)
    if not path.is_symlink() and not path.exists():
        create(path)


@pytest.fixture
def a_descriptor(tmp_path):
    (tmp_path / "file").write_text("text")
    return Descriptor(tmp_path / "file", os.O_RDONLY)


def is_open(number):
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def test_it_is_closed_once(a_descriptor):
    number = a_descriptor.number
    with a_descriptor:
        assert is_open(number)
    assert not is_open(number)
    a_descriptor.close()


def test_it_is_closed_when_nothing_refers_to_it(a_descriptor, monkeypatch):
    """Also at the interpreter's end, where modules are gone already."""
    number = a_descriptor.number
    monkeypatch.setattr(paths, "os", None)
    a_descriptor.__del__()
    assert not is_open(number)
