"""The owner of a directory by a generator with a known truth: marks, encodings, subfolders and steps of all formats."""

import io
import re

import hypothesis
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from hypothesis import strategies as st

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointError, CheckpointNotFoundError, UnsupportedCheckpointError
from orbax_t5x.readers.detect.owner import owner_of_directory
from orbax_t5x.readers.detect.probe import probe_path
from orbax_t5x.readers.format_table import all_formats
from tests.support.bundle_writer import bundle_of
from tests.support.gguf_files import write_gguf
from tests.support.torch_files import save_torch

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


def test_a_state_names_a_bundle_that_is_there(tmp_path):
    (tmp_path / "a").mkdir()
    bundle_of(ARRAYS).write(tmp_path / "a", "m")
    for named, owner in (("a/m", "tf_bundle"), ("../a/m", None), ("/elsewhere/m", None), ("b/m", None)):
        (tmp_path / "checkpoint").write_text(f'model_checkpoint_path: "{named}"\n')
        found = owner_of_directory(probe_path(str(tmp_path)), all_formats())
        assert (found and found.name) == owner, named
