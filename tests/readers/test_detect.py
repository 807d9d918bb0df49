"""Which format owns a path: a directory with anything in it, links that lead out, and what is no path."""

import errno
import io
import os
import re
import shutil
import warnings
from pathlib import Path

import hypothesis
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from hypothesis import strategies as st

import orbax_t5x as ot
from orbax_t5x.errors import (
    CheckpointError,
    CheckpointIOError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsafeCheckpointError,
    UnsupportedCheckpointError,
)
from orbax_t5x.readers.detect import path_text
from orbax_t5x.readers.format_table import all_formats
from tests.support.bundle_writer import bundle_of
from tests.support.gguf_files import write_gguf
from tests.support.torch_files import save_torch

TREE = {"a": np.arange(6, dtype=np.float32)}


@pytest.fixture
def outside(tmp_path):
    """A directory beside the root, with a checkpoint of each kind."""
    directory = tmp_path / "outside"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(directory / "step" / "state", args=ocp.args.PyTreeSave(TREE))
    (directory / "step" / "_CHECKPOINT_METADATA").write_text("{}")
    bundle_of(TREE).write(directory, "m")
    (directory / "checkpoint").write_text('model_checkpoint_path: "m"\n')
    (directory / "msgpack").write_bytes(b"\x82\xa7version\x03\xa9optimizer\x80")
    return directory


# What stands in the root: name -> where it leads, relative to the directory outside; None makes a directory.
LINKS = {
    "the index of a bundle": {"m.index": "m.index"},
    "the text file of a bundle": {"checkpoint": "checkpoint"},
    "the msgpack file of T5X": {"checkpoint": "msgpack"},
    "the names of an item": {"_METADATA": "step/state/_METADATA"},
    "the database of an item": {"manifest.ocdbt": "step/state/manifest.ocdbt"},
    "the metadata of a step": {"_CHECKPOINT_METADATA": "step/_CHECKPOINT_METADATA"},
    "an item": {"state": "step/state"},
    "a part of a database": {"ocdbt.process_0": "step/state"},
    "a step": {"5": "step"},
    "the msgpack file of a step": {"5": None, "5/checkpoint": "msgpack"},
    "an item of a step": {"5": None, "5/state": "step/state"},
    "safetensors": {"model.safetensors": "msgpack"},
    "Hugging Face's msgpack": {"flax_model.msgpack": "msgpack"},
    "two links after another": {"m.index": "../root/n", "n": "m.index"},
}

OTHER_ERRORS = {
    "the database of an item": CorruptCheckpointError,  # it has no list of names, wherever it leads
    "an item of a step": CheckpointNotFoundError,  # a directory without any mark of a step
}


@pytest.mark.parametrize("case", LINKS)
def test_links_out_of_the_path_are_unsafe(case, outside, tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    for name, target in LINKS[case].items():
        if target is None:
            (root / name).mkdir()
        else:
            (root / name).symlink_to(outside / target)
    with pytest.raises(OTHER_ERRORS.get(case, UnsafeCheckpointError)) as caught:
        ot.open_checkpoint(root)
    assert (caught.value.path or "").startswith(str(root))
    if case in ("a step", "a part of a database"):  # the name of which could be a step's
        with pytest.raises(UnsafeCheckpointError):
            ot.latest_step(root)
    else:
        ot.latest_step(root)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert ot.latest_step(root, validated=True) is None
    for format in ("tf_bundle", "orbax", "t5x", "safetensors", "flax_msgpack"):
        with pytest.raises(CheckpointError):
            ot.open_checkpoint(root, format=format)


def test_links_that_stay_inside_are_followed(outside, tmp_path):
    root = tmp_path / "root"
    shutil.copytree(outside / "step", root / "7")
    (root / "9").symlink_to("7")
    (root / "7" / "model").symlink_to("state")
    assert ot.latest_step(root) == ot.latest_step(root, validated=True) == 9
    with ot.open_checkpoint(root) as checkpoint:
        assert sorted(checkpoint.leaves) == ["model/a", "state/a"]


def test_a_link_out_of_an_older_step_is_in_nobodys_way(outside, tmp_path):
    root = tmp_path / "root"
    shutil.copytree(outside / "step", root / "7")
    (root / "3").symlink_to(outside / "step")
    assert ot.latest_step(root) == 7
    with ot.open_checkpoint(root) as checkpoint:
        assert checkpoint.step == 7


def test_a_file_that_cannot_be_looked_at_is_no_missing_one(outside, monkeypatch):
    lstat = os.lstat

    def refuse(path, *arguments, **keywords):
        if os.path.basename(path) == "_METADATA":
            raise OSError(errno.EIO, "Input/output error")
        return lstat(path, *arguments, **keywords)

    monkeypatch.setattr(os, "lstat", refuse)
    with pytest.raises(CheckpointIOError, match="_METADATA") as caught:
        ot.open_checkpoint(outside / "step" / "state")
    assert caught.value.errno == errno.EIO


ARRAYS = {"w": np.arange(3, dtype=np.float32)}
T5X_STEP = {"checkpoint": b"\x82\xa7version\x03\xa9optimizer\x82\xa6target\x80\xa5state\x80"}
STATE = b'model_checkpoint_path: "model.ckpt-9"'
FLAX = b"\x81\xa1w\xc0"


def opener(format):
    """Opens a path of a toy, of which only the format matters."""
    return lambda path, *, limits: ot.Checkpoint(path=path, format=format, step=None, leaves={})


class Pieces(dict):
    """What may lie in a directory, by name: its class, its format, and its files; bytes would fill a report."""

    def __repr__(self):
        return "pieces"


def files_of(directory):
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    made = tmp_path_factory.mktemp("made")

    def bytes_of(write, name):
        write(made / name)
        return (made / name).read_bytes()

    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(made / "item", ARRAYS)
    item = files_of(made / "item")
    for kind in ("model", "iterator"):
        (made / kind).mkdir()
    bundle_of(ARRAYS).write(made / "model", "model.ckpt-9")
    bundle_of(ARRAYS).write(made / "iterator", "train_ds-00000-of-00001")
    tensors, adapter, weights = (safetensors.numpy.save({name: ARRAYS["w"]}) for name in "wav")
    torch = bytes_of(lambda path: save_torch(path, ARRAYS), "t")
    gguf = bytes_of(lambda path: write_gguf(path, ARRAYS), "g")
    npz = io.BytesIO()
    np.savez(npz, **ARRAYS)

    def below(folder, files):
        return {f"{folder}/{name}": data for name, data in files.items()}

    index = files_of(made / "model")
    return Pieces(
        {
            "a T5X step": ("mark", "t5x", T5X_STEP),
            "an Orbax item": ("mark", "orbax", item),
            "a bundle": ("mark", "tf_bundle", index),
            "a bundle with a state": (
                "mark",
                "tf_bundle",
                {**index, "checkpoint": b'model_checkpoint_path: "model.ckpt-9"'},
            ),
            "a toy": ("mark", "toy", {"one.toy": b"TOY1", "two.toy": b"TOY1"}),
            "a model of safetensors": ("loose", "safetensors", {"model.safetensors": tensors}),
            "an adapter of safetensors": ("loose", "safetensors", {"adapter_model.safetensors": adapter}),
            "safetensors": ("loose", "safetensors", {"weights.safetensors": weights}),
            "a model of PyTorch": ("loose", "torch", {"pytorch_model.bin": torch}),
            "an adapter of PyTorch": ("loose", "torch", {"adapter_model.bin": torch}),
            "a model in msgpack": ("loose", "flax_msgpack", {"flax_model.msgpack": FLAX}),
            "a model in several msgpack files": (
                "loose",
                "flax_msgpack",
                {
                    "flax_model.msgpack.index.json": b'{"weight_map": {"w": "flax_model-00001-of-00001.msgpack"}}',
                    "flax_model-00001-of-00001.msgpack": FLAX,
                },
            ),
            "GGUF": ("loose", "gguf", {"weights.gguf": gguf}),
            "a loose toy": ("loose", "named", {"named.array": b""}),
            "Orbax steps": ("steps", "orbax", {**below("3/default", item), **below("12/default", item)}),
            "T5X steps": ("steps", "t5x", {**below("checkpoint_2", T5X_STEP), **below("checkpoint_11", T5X_STEP)}),
            "files of steps": ("steps", "flax_msgpack", {"checkpoint_5": FLAX, "checkpoint_13": FLAX}),
            "an item in a folder": ("folder", "orbax", below("tuned", item)),
            "an iterator": ("nothing", "", files_of(made / "iterator")),
            "text": ("nothing", "", {"README.md": b"x", "config.json": b"{}", "7": b"x", "notes.index": b"x"}),
            "an npz": ("nothing", "", {"arrays.npz": npz.getvalue()}),
            "a bundle in a folder": ("nothing", "", below("eval", index)),
            "an unfinished step": ("nothing", "", {**below("99.orbax-checkpoint-tmp/default", item), "98/notes": b"x"}),
            "a pickle": ("nothing", "", {"training_args.bin": b"\x80\x04"}),
        }
    )


def expected(names, pieces):
    """The formats that own a directory of some pieces: more than one is an error."""
    found = {kind: {pieces[name][1] for name in names if pieces[name][0] == kind} for kind in KINDS}
    if found["mark"]:
        return found["mark"]
    if found["loose"]:
        if "a model of safetensors" in names:
            return found["loose"] - {"torch", "flax_msgpack", "gguf"} | torch_left(names)
        if "an adapter of safetensors" in names and "a model of PyTorch" not in names:
            return found["loose"] - {"torch"}
        return found["loose"]
    return found["steps"] or found["folder"]


def torch_left(names):
    """An adapter is no encoding of a model."""
    is_alone = "an adapter of PyTorch" in names and "an adapter of safetensors" not in names
    return {"torch"} if is_alone else set()


KINDS = ("mark", "loose", "steps", "folder", "nothing")
# Two pieces of one file, or that are together something else.
CLASHES = [{"a T5X step", "a bundle with a state"}]


@pytest.fixture(scope="module")
def toys():
    toy = ot.Format("toy", opener("toy"), directory=[ot.Mark("*.toy", head=b"TOY1")])
    named = ot.Format("named", opener("named"), directory=[ot.Mark("named.array", weight="loose")])
    with ot.register_format(toy), ot.register_format(named):
        yield


@pytest.mark.slow
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(data=st.data())
def test_the_owner_of_any_directory(data, pieces, toys, tmp_path_factory):
    names = data.draw(st.lists(st.sampled_from(sorted(pieces)), unique=True, max_size=6).filter(is_possible))
    directory = tmp_path_factory.mktemp("any") / "run"
    for name in names:
        for file, content in pieces[name][2].items():
            (directory / file).parent.mkdir(parents=True, exist_ok=True)
            (directory / file).write_bytes(content)
    directory.mkdir(exist_ok=True)
    owners = expected(names, pieces)
    if not owners:
        with pytest.raises(CheckpointError) as caught:
            ot.open_checkpoint(directory)
        assert isinstance(caught.value, (CheckpointNotFoundError, UnsupportedCheckpointError))
    elif len(owners) == 1:
        with ot.open_checkpoint(directory) as checkpoint:
            assert {checkpoint.format} == owners
    else:
        with pytest.raises(UnsupportedCheckpointError, match="formats own this path") as caught:
            ot.open_checkpoint(directory)
        # Steps of a third format are found when the first two are told apart.
        named = set(re.findall(r"format='(\w+)'", str(caught.value)))
        assert named <= owners and len(named) >= 2


def is_possible(names):
    return not any(clash <= set(names) for clash in CLASHES)


@pytest.mark.parametrize("damage", [b"", None])
def test_a_damaged_step_is_not_opened_as_its_iterator(damage, pieces, tmp_path):
    for file, content in pieces["an iterator"][2].items():
        (tmp_path / file).write_bytes(content)
    if damage is not None:
        (tmp_path / "checkpoint").write_bytes(damage)
    with pytest.raises(CheckpointError):
        ot.open_checkpoint(tmp_path)
    assert ot.open_checkpoint(tmp_path / "train_ds-00000-of-00001").format == "tf_bundle"


def test_the_truth_knows_all_marks_of_directories(pieces, toys):
    """A format that is added to the table has a piece here."""
    with_marks = {row.name for row in all_formats() if any(mark.weight != "hint" for mark in row.directory)}
    assert with_marks == {format for kind, format, _ in pieces.values() if kind in ("mark", "loose")}


def test_files_beside_a_saved_item(pieces, tmp_path):
    """A fine-tune that is saved beside the pretrained files does not change what their path means."""
    for name in ("a model of safetensors", "an item in a folder", "Orbax steps"):
        for file, content in pieces[name][2].items():
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_bytes(content)
    assert ot.open_checkpoint(tmp_path).format == "safetensors"
    assert ot.open_checkpoint(tmp_path / "tuned").format == "orbax"
    assert ot.open_checkpoint(tmp_path, format="orbax").step == 12


def test_a_file_whose_name_and_bytes_are_of_two_formats(pieces, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(pieces["a model of safetensors"][2]["model.safetensors"])
    with pytest.raises(UnsupportedCheckpointError, match=r"safetensors by its first bytes.*gguf by its name"):
        ot.open_checkpoint(path)
    with ot.open_checkpoint(path, format="safetensors") as checkpoint:
        assert list(checkpoint.leaves) == ["w"]


def test_a_state_names_a_bundle_in_another_directory(tmp_path):
    (tmp_path / "a").mkdir()
    bundle_of(ARRAYS).write(tmp_path / "a", "m")
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "a/m"\n')
    with ot.open_checkpoint(tmp_path) as checkpoint:
        assert (checkpoint.format, list(checkpoint.leaves)) == ("tf_bundle", ["w"])


def test_a_local_path_is_expanded_and_otherwise_stays(monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    assert path_text("~/run/../step") == "/somewhere/run/../step"
    assert path_text(Path("a/b")) == "a/b" and path_text("a~b") == "a~b"


@pytest.mark.parametrize("url", ["gs://bucket/run", "s3://bucket/run", "https://host/run"])
def test_a_url_stays(url):
    assert path_text(url) == url


@pytest.mark.parametrize(
    ("path", "kind", "word"),
    [
        ("", CheckpointNotFoundError, "is empty"),
        ("a\0b", CheckpointNotFoundError, "NUL"),
        (["a", "b"], TypeError, "not list"),
        (3, TypeError, "int"),
        (os.fsencode("a"), TypeError, "bytes"),
        ("ftp://host/run", UnsupportedCheckpointError, "ftp"),
    ],
)
def test_what_is_no_path_is_refused_by_name(path, kind, word):
    with pytest.raises(kind, match=word):
        path_text(path)
