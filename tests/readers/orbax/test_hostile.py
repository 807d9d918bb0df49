"""Damaged and hostile Orbax checkpoints: typed errors that name file and leaf, at once; what is whole is still read."""

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import struct
import subprocess
import sys

import cramjam
import google_crc32c
import hypothesis
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import strategies as st

import orbax_t5x as ot
from orbax_t5x.errors import (
    CheckpointError,
    CheckpointGoneError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LimitExceededError,
    UnsafeCheckpointError,
    UnsupportedCheckpointError,
)
from orbax_t5x.storage.limits import Limits
from tests.support.orbax_metadata import entry, with_tree

_RNG = np.random.default_rng(3)
# Too large to be stored inside a node of the OCDBT tree, and incompressible.
TREE = {"a": _RNG.random((64, 64)), "b": {"c": _RNG.random((64, 64)), "small": np.arange(3)}}
FLAT = {"a": TREE["a"], "b/c": TREE["b"]["c"], "b/small": TREE["b"]["small"]}


@pytest.fixture(autouse=True)
def quiet_logs():
    """Orbax logs the tracebacks of what it also raises."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The tree in each layout, saved once."""
    root = tmp_path_factory.mktemp("saved")
    for ocdbt in (True, False):
        for zarr3 in (True, False):
            handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)
            with ocp.Checkpointer(handler) as checkpointer:
                checkpointer.save(root / f"{ocdbt}{zarr3}", args=ocp.args.PyTreeSave(TREE))
    return root


@pytest.fixture
def item(saved, tmp_path):
    """A copy of one layout: `item(ocdbt=True, zarr3=False)`."""

    def copy(*, ocdbt=True, zarr3=False, to="item"):
        shutil.rmtree(tmp_path / to, ignore_errors=True)
        return shutil.copytree(saved / f"{ocdbt}{zarr3}", tmp_path / to, symlinks=True)

    return copy


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


def outcome(path, **kwargs):
    """Name -> value or error of every leaf; an error of the checkpoint as a whole under None."""
    try:
        with ot.open_checkpoint(path, **kwargs) as checkpoint:
            result = {}
            for name, lazy in checkpoint.leaves.items():
                try:
                    result[name] = lazy.get()
                except CheckpointError as error:
                    assert error.leaf == name
                    assert error.path is not None and error.path.startswith(str(path))
                    result[name] = error
            return result
    except CheckpointError as error:
        assert str(path) in str(error)
        return {None: error}


def right_or(kinds, result, expected=FLAT):
    """Every leaf is right or an error of these kinds; returns the names that are errors."""
    wrong = set()
    if None in result:
        assert isinstance(result[None], kinds), result[None]
        return {None}
    assert result.keys() == expected.keys()
    for name, value in result.items():
        if isinstance(value, Exception):
            assert isinstance(value, kinds), value
            wrong.add(name)
        else:
            np.testing.assert_array_equal(value, expected[name])
    return wrong


def files_of(directory):
    return sorted(os.path.join(parent, name) for parent, _, names in os.walk(directory) for name in names)


def test_the_good_ones(item):
    for ocdbt in (True, False):
        for zarr3 in (True, False):
            path = item(ocdbt=ocdbt, zarr3=zarr3)
            before = tree_hash(path)
            assert not right_or((), outcome(path))
            assert tree_hash(path) == before, "reading wrote something"


# -- OCDBT


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


# -- names and files


@pytest.mark.parametrize(
    ("key", "error"),
    [
        ("..", UnsafeCheckpointError),
        ("../../etc", UnsafeCheckpointError),
        ("a/../../b", UnsafeCheckpointError),
        ("/etc/passwd", UnsafeCheckpointError),
        ("", UnsupportedCheckpointError),
        ("a\0b", UnsupportedCheckpointError),
        ("\ud800", CorruptCheckpointError),
        (7, CorruptCheckpointError),
        (None, CorruptCheckpointError),
        (["a"], CorruptCheckpointError),
    ],
)
@pytest.mark.parametrize("ocdbt", [True, False])
def test_hostile_keys(item, key, error, ocdbt):
    path = with_tree(item(ocdbt=ocdbt), entry("a"), entry("b", key))
    with pytest.raises(error, match="_METADATA"):
        ot.open_checkpoint(path)


@pytest.mark.parametrize(
    "said",
    [
        None,
        [],
        {},
        {"key_metadata": []},
        entry("a") | {"key_metadata": {}},
        entry("a") | {"key_metadata": ["a"]},
        entry("a") | {"value_metadata": None},
        entry("a") | {"value_metadata": {"value_type": 3}},
        entry("a") | {"value_metadata": {"value_type": "np.ndarray", "skip_deserialize": "no"}},
        entry("a", kinds=[3]),
        entry("a", kinds=[True]),
        entry("a", kinds=[1]),
        entry("-1", kinds=[1]),
        entry("\u0661", kinds=[1]),
    ],
)
def test_broken_entries(item, said):
    with pytest.raises(CorruptCheckpointError, match="_METADATA"):
        ot.open_checkpoint(with_tree(item(), said))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"tree_metadata": []}',
        '{"tree_metadata": {}, "tree_metadata": {}}',
        '{"tree_metadata": {}, "use_zarr3": 1}',
        '{"tree_metadata": {}, "use_ocdbt": "yes"}',
        '{"tree_metadata": ' + '{"a":' * 100_000,
        "[" * 1_000_000,
        "\ufeff{}",
    ],
)
def test_broken_metadata(item, text):
    path = item()
    (path / "_METADATA").write_text(text)
    with pytest.raises(CorruptCheckpointError, match="_METADATA"):
        ot.open_checkpoint(path)


def test_two_nodes_of_one_name_or_place(item):
    with pytest.raises(CorruptCheckpointError, match="two leaves have this name") as caught:
        ot.open_checkpoint(with_tree(item(), entry("b", "c"), entry("b", "c")))
    assert caught.value.leaf == "b/c"
    with pytest.raises(UnsupportedCheckpointError, match="two leaves have this name") as caught:
        ot.open_checkpoint(with_tree(item(), entry("b", "c"), entry("b/c")))
    assert caught.value.leaf == "b/c"
    with pytest.raises(CorruptCheckpointError, match="one was written over the other"):
        ot.open_checkpoint(with_tree(item(), entry("b", "c"), entry("b.c")))
    with pytest.raises(CorruptCheckpointError, match="one was written over the other"):
        ot.open_checkpoint(with_tree(item(), entry("b"), entry("b/")))
    with pytest.raises(UnsupportedCheckpointError, match="two leaves have this name"):
        ot.open_checkpoint(with_tree(item(), entry("b", "0"), entry("b/0", value_type="None", skip=True)))
    with pytest.raises(CorruptCheckpointError, match="leaves below it"):
        ot.open_checkpoint(with_tree(item(), entry("b"), entry("b", "c")))


def test_limits(item):
    path = item()
    for limits in (Limits(index_bytes=100), Limits(entries=2), Limits(name_bytes=3)):
        with pytest.raises(LimitExceededError, match="Limits"):
            ot.open_checkpoint(path, limits=limits)
    result = outcome(path, limits=Limits(rank=1))
    assert right_or((LimitExceededError,), result) == {"a", "b/c"}


def test_a_leaf_that_is_only_named(item):
    for ocdbt in (True, False):
        path = with_tree(item(ocdbt=ocdbt), entry("a"), entry("b", "c"), entry("b", "small"), entry("nowhere"))
        result = outcome(path)
        assert isinstance(result.pop("nowhere"), CorruptCheckpointError)
        assert not right_or((), result)


def test_a_restore_that_needs_a_broken_leaf_says_what_is_wrong_with_it(item):
    path = item(ocdbt=False)
    os.remove(path / "a" / ".zarray")
    target = {"a": np.zeros((64, 64)), "b": {"c": np.zeros((64, 64)), "small": np.zeros(3, int)}}
    with pytest.raises(CorruptCheckpointError, match=r"\.zarray") as caught:
        ot.restore(path, target)
    assert caught.value.leaf == "a"
    del target["a"]
    restored = ot.restore(path, target, strict=False)
    np.testing.assert_array_equal(restored["b"]["c"], FLAT["b/c"])


def test_values_that_are_not_arrays(item):
    path = with_tree(
        item(),
        entry("a"),
        entry("text", value_type="string"),
        entry("old", value_type="np.ndarray", skip=True),
        entry("rows", value_type="Dict", skip=True),
    )
    with ot.open_checkpoint(path) as checkpoint:
        assert list(checkpoint.leaves) == ["a", "old", "text"]
        with pytest.raises(CorruptCheckpointError, match=r"_strings\.json"):
            checkpoint.leaves["text"].get()
        with pytest.raises(CorruptCheckpointError, match="msgpack"):
            checkpoint.leaves["old"].get()
        np.testing.assert_array_equal(checkpoint.leaves["a"].get(), FLAT["a"])
    for text in ("[]", '{"text": 3}', '{"text": "\\ud800"}', '{"text": "a", "text": "b"}'):
        (path / "_strings.json").write_text(text)
        with pytest.raises(CorruptCheckpointError, match=r"_strings\.json"):
            ot.open_checkpoint(path)


@pytest.mark.parametrize("text", ["{", "[]", '{"array_metadatas": [{}]}', '{"array_metadatas": 3}'])
def test_broken_array_metadatas(item, text):
    path = item()
    (path / "array_metadatas").mkdir(exist_ok=True)
    (path / "array_metadatas" / "process_0").write_text(text)
    with pytest.raises(CorruptCheckpointError, match="process_0"):
        ot.open_checkpoint(path)


def test_shardings_are_not_looked_at(item):
    for text in (
        "{",
        json.dumps({"YQ==": json.dumps({"sharding_type": "NamedSharding", "device_mesh": {"mesh": [1e9]}})}),
    ):
        path = item()
        (path / "_sharding").write_text(text)
        assert not right_or((), outcome(path))


def test_handlers_are_not_imported(item, tmp_path, monkeypatch):
    (tmp_path / "hostile_handler_module.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    path = item(to="3/state").parent
    said = {"item_handlers": {"state": "hostile_handler_module.Handler", "gone": "os.system"}}
    (path / "_CHECKPOINT_METADATA").write_text(json.dumps(said))
    with ot.open_checkpoint(path) as checkpoint:
        assert checkpoint.metadata["step_metadata"] == said
        assert list(checkpoint.leaves) == list(FLAT)
    assert "hostile_handler_module" not in sys.modules
    (path / "_CHECKPOINT_METADATA").write_text("{")
    with pytest.raises(CorruptCheckpointError, match="_CHECKPOINT_METADATA"):
        ot.open_checkpoint(path)


def test_a_step_without_arrays(item, tmp_path):
    step = tmp_path / "5"
    (step / "config").mkdir(parents=True)
    (step / "config" / "metadata").write_text("{}")
    (step / "_CHECKPOINT_METADATA").write_text('{"item_handlers": {"config": "json.Handler"}}')
    with pytest.raises(UnsupportedCheckpointError, match=r"'config' by 'json\.Handler'"):
        ot.open_checkpoint(step)
    item(to="5/state")
    os.remove(step / "state" / "_METADATA")
    with pytest.raises(CorruptCheckpointError, match="_METADATA is missing"):
        ot.open_checkpoint(step)


def test_an_unfinished_save_is_not_opened(item):
    for to in ("3.orbax-checkpoint-tmp", "4.orbax-checkpoint-tmp-17/state"):
        with pytest.raises(CheckpointNotFoundError, match="unfinished"):
            ot.open_checkpoint(item(to=to))


# -- files of zarr arrays


@pytest.mark.parametrize("kind", ["fifo", "directory", "link out", "dangling", "circle", "device"])
@pytest.mark.parametrize("victim", ["a/.zarray", "a/0.0", "a/zarr.json", "a/c/0/0", "a", "manifest.ocdbt", "_METADATA"])
def test_what_is_no_plain_file(item, tmp_path, kind, victim):
    zarr3 = victim in ("a/zarr.json", "a/c/0/0")
    path = item(ocdbt=victim == "manifest.ocdbt", zarr3=zarr3)
    place = path / victim
    outside = tmp_path / "outside"
    shutil.move(place, outside)
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "directory":
        place.mkdir()
    else:
        place.symlink_to(
            {"link out": outside, "dangling": "nowhere", "circle": place.name, "device": "/dev/zero"}[kind]
        )
    result = outcome(path)
    wrong = right_or((UnsafeCheckpointError, CorruptCheckpointError, CheckpointNotFoundError), result)
    if victim in ("_METADATA", "manifest.ocdbt"):
        assert wrong == {None}
    else:
        assert wrong == {"a"}, "the other leaves can be read"
    if kind == "link out":
        assert isinstance(result[wrong.pop()], UnsafeCheckpointError)


@pytest.mark.parametrize("kind", ["fifo", "link out"])
def test_a_chunk_in_a_directory_of_its_own(item, tmp_path, kind):
    """A zarr v2 array may keep its chunks in directories, where TensorStore would follow a link and wait on a FIFO."""
    path = item(ocdbt=False)
    metadata = json.loads((path / "a" / ".zarray").read_text())
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(range(256)) * 128)
    (path / "a" / ".zarray").write_text(json.dumps(metadata | {"compressor": None, "dimension_separator": "/"}))
    (path / "a" / "0.0").unlink()
    (path / "a" / "0").mkdir()
    if kind == "fifo":
        os.mkfifo(path / "a" / "0" / "0")
    else:
        (path / "a" / "0" / "0").symlink_to(secret)
    expected = CorruptCheckpointError if kind == "fifo" else UnsafeCheckpointError
    with ot.open_checkpoint(path) as checkpoint:
        with pytest.raises(expected) as caught:
            checkpoint.leaves["a"].get()
        assert caught.value.leaf == "a" and str(caught.value.path).startswith(str(path / "a"))
        np.testing.assert_array_equal(checkpoint.leaves["b/c"].get(), FLAT["b/c"])
    with pytest.raises(CheckpointError):
        ot.restore(path, None)


@pytest.mark.parametrize("kind", ["fifo", "link out"])
def test_a_chunk_replaced_after_opening(item, tmp_path, kind):
    """The same, put there between opening and reading."""
    path = item(ocdbt=False, zarr3=True)
    chunk = path / "a" / "c" / "0" / "0"
    with ot.open_checkpoint(path) as checkpoint:
        shutil.move(chunk, tmp_path / "chunk")
        if kind == "fifo":
            os.mkfifo(chunk)
        else:
            chunk.symlink_to(tmp_path / "chunk")
        with pytest.raises(CorruptCheckpointError if kind == "fifo" else UnsafeCheckpointError):
            checkpoint.leaves["a"].get()


def test_links_inside_are_followed(item):
    path = item(ocdbt=False)
    shutil.move(path / "a", path / "elsewhere")
    (path / "a").symlink_to("elsewhere")
    shutil.move(path / "b.c" / "0.0", path / "chunk")
    (path / "b.c" / "0.0").symlink_to(path / "chunk")
    assert not right_or((), outcome(path))


def test_a_data_file_linked_from_outside(item, tmp_path):
    path = item()
    (node,) = os.listdir(path / "d")
    shutil.move(path / "d" / node, tmp_path / "outside")
    (path / "d" / node).symlink_to(tmp_path / "outside")
    with pytest.raises(UnsafeCheckpointError, match="leads out"):
        ot.open_checkpoint(path)


ZARRAY = {
    "chunks": [64, 64],
    "compressor": None,
    "dimension_separator": ".",
    "dtype": "<f8",
    "fill_value": None,
    "filters": None,
    "order": "C",
    "shape": [64, 64],
    "zarr_format": 2,
}


@pytest.mark.parametrize(
    "change",
    [
        {"chunks": [0, 64]},
        {"chunks": [-1, 64]},
        {"chunks": [64]},
        {"shape": [-64, 64]},
        {"shape": [1 << 63, 64]},
        {"shape": [2.5, 64]},
        {"shape": [1] * 33, "chunks": [1] * 33},
        {"dtype": "|O"},
        {"dtype": "<U4"},
        {"dtype": "pickle"},
        {"dtype": [["x", "<f4"], ["y", "<f4"]]},
        {"filters": [{"id": "pickle"}]},
        {"compressor": {"id": "lzma"}},
        {"compressor": {"id": "blosc", "clevel": 100}},
        {"dimension_separator": "x"},
        {"order": "Q"},
        {"zarr_format": 3},
        {"zarr_format": None},
        "{",
        "[]",
        "[" * 100_000,
    ],
)
def test_hostile_array_metadata(item, change):
    path = item(ocdbt=False)
    (path / "a" / ".zarray").write_text(change if isinstance(change, str) else json.dumps(ZARRAY | change))
    wrong = right_or((CorruptCheckpointError, UnsupportedCheckpointError, LimitExceededError), outcome(path))
    assert wrong == {"a"}


def test_a_huge_claim_opens_and_is_not_allocated(item):
    path = item(ocdbt=False)
    shape = [1 << 20, 1 << 20]
    (path / "a" / ".zarray").write_text(json.dumps(ZARRAY | {"shape": shape, "chunks": shape}))
    with ot.open_checkpoint(path) as checkpoint:
        assert checkpoint.leaves["a"].shape == tuple(shape)
        with pytest.raises(LimitExceededError, match="a chunk of shape") as caught:
            checkpoint.leaves["a"][:1, :1].get()
        assert caught.value.leaf == "a"
        np.testing.assert_array_equal(checkpoint.leaves["b/c"].get(), FLAT["b/c"])


@pytest.mark.parametrize("compressor", [None, "gzip", "zstd"])
@pytest.mark.parametrize("size", [0, 1, 32767, 32769, 128 << 20])
def test_chunks_of_another_size(item, compressor, size):
    path = item(ocdbt=False)
    codec = compressor and {"id": compressor, "level": 1}
    (path / "a" / ".zarray").write_text(json.dumps(ZARRAY | {"compressor": codec}))
    if compressor is None:
        with open(path / "a" / "0.0", "wb") as file:
            file.truncate(size)
    else:
        packed = getattr(cramjam, compressor).compress(bytes(size), level=1)
        (path / "a" / "0.0").write_bytes(bytes(packed))
    assert right_or((CorruptCheckpointError,), outcome(path)) == {"a"}


@pytest.mark.slow
def test_what_the_operating_system_refuses(item):
    """Out of descriptors is no damage: a typed OSError with its number, naming the leaf."""
    path = item(ocdbt=False)
    code = (
        "import resource, orbax_t5x as ot\n"
        f"with ot.open_checkpoint({str(path)!r}) as checkpoint:\n"
        "    checkpoint.leaves['b/c'].get()\n"
        "    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))\n"
        "    try:\n"
        "        checkpoint.leaves['a'].get()\n"
        "    except ot.errors.CheckpointIOError as error:\n"
        "        print(error.errno, error.leaf, error.path)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=800)
    assert done.stdout.split() == [str(errno.EMFILE), "a", str(path / "a")], done.stderr


def test_a_directory_that_vanishes(item):
    path = item(ocdbt=False)
    with ot.open_checkpoint(path) as checkpoint:
        shutil.rmtree(path)
        with pytest.raises(CheckpointGoneError) as caught:
            checkpoint.leaves["a"].get()
        assert (caught.value.leaf, caught.value.path) == ("a", str(path / "a"))


@pytest.mark.parametrize(("ocdbt", "zarr3"), [(True, False), (False, False), (False, True)])
def test_deleted_while_it_is_opened(item, ocdbt, zarr3):
    """Deletion by whoever keeps only the newest steps, at any moment: right values, or an error that says so."""
    for done in range(0, 12):
        path = item(ocdbt=ocdbt, zarr3=zarr3)
        for file in files_of(path)[:done]:
            os.remove(file)
        kinds = (CheckpointGoneError, CorruptCheckpointError, CheckpointNotFoundError)
        right_or(kinds, outcome(path))


# -- anything at all

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text("a/.0", max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=3), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def metadata_near(draw, good):
    """`_METADATA` with some of its parts replaced."""
    made = json.loads(good)
    for _ in range(draw(st.integers(1, 3))):
        node, path = made, []
        while isinstance(node, dict | list) and node and (not path or draw(st.integers(0, 4))):
            keys = sorted(node) if isinstance(node, dict) else list(range(len(node)))
            path.append((node, draw(st.sampled_from(keys))))
            node = path[-1][0][path[-1][1]]
        if path:
            parent, key = path[-1]
            parent[key] = draw(_JSON)
    return json.dumps(made)


@hypothesis.given(st.data())
@hypothesis.settings(
    max_examples=80,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow],
)
def test_any_metadata_is_an_error_or_a_checkpoint(saved, tmp_path, data):
    """Total: a typed error, or leaves that read or have one."""
    path = tmp_path / "item"
    if not path.exists():
        shutil.copytree(saved / "TrueFalse", path)
    good = (saved / "TrueFalse" / "_METADATA").read_text()
    (path / "_METADATA").write_text(data.draw(metadata_near(good)))
    with contextlib.suppress(CheckpointError), ot.open_checkpoint(path) as checkpoint:
        checkpoint.tree()
        for lazy in checkpoint.leaves.values():
            with contextlib.suppress(CheckpointError):
                lazy.get()


def test_a_step_linked_from_outside(item, tmp_path):
    """A root is what the caller named; its newest step is not."""
    outside = item(to="elsewhere/state").parent
    root = tmp_path / "root"
    root.mkdir()
    (root / "3").symlink_to(outside)
    with pytest.raises(UnsafeCheckpointError, match="leads out"):
        ot.open_checkpoint(root)
    assert not right_or((), outcome(root / "3")), "by its own path it is what the caller named"
    shutil.move(outside, root / "kept")
    (root / "3").unlink()
    (root / "3").symlink_to("kept")
    assert not right_or((), outcome(root)), "a link that stays inside"
