"""Flax msgpack files, written by Flax and by Transformers (goldens), against Flax's own reader."""

import json
import struct
import subprocess
import sys
import textwrap

import flax.serialization
import hypothesis
import hypothesis.extra.numpy as hnp
import jax
import ml_dtypes
import msgpack
import numpy as np
import pytest
from hypothesis import strategies as st

import orbax_t5x as ot
from orbax_t5x.files.limits import Limits
from orbax_t5x.testing.leaf_reads import assert_same
from orbax_t5x.testing.reader_suite import ReaderSuite
from orbax_t5x.trees.flat import unflatten
from tests.support.format_suites import FlaxIndexSuite, FlaxMsgpackSuite

MIB = 1 << 20


class TestFile(FlaxMsgpackSuite):
    pass


class TestIndex(FlaxIndexSuite):
    pass


class TestChunkedArrays(ReaderSuite):
    """Flax cuts arrays above a size into flat chunks; here above a size that cuts in the middle of rows."""

    def write(self, directory, arrays):
        path = directory / "flax_model.msgpack"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 1_000_000)
            path.write_bytes(flax.serialization.msgpack_serialize(unflatten(dict(arrays))))
        return directory

    def test_it_was_cut(self, written):
        assert (written[0] / "flax_model.msgpack").read_bytes().count(b"__msgpack_chunked_array__") == 1


def open_bytes(directory, data, name="state.msgpack", **limits):
    path = directory / name
    path.write_bytes(data)
    return ot.open_checkpoint(path, format="flax_msgpack", limits=Limits(**limits))


NUMBER_TYPES = [
    *(np.bool_, np.int8, np.uint16, np.int32, np.uint64, np.float16, np.float32, np.float64, np.complex64),
    *(ml_dtypes.bfloat16, ml_dtypes.float8_e5m2),
]
ARRAYS = st.builds(
    lambda bits, dtype: bits.astype(dtype),
    hnp.arrays(np.int8, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)),
    st.sampled_from(NUMBER_TYPES),
)
SCALARS = st.one_of(
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
    st.booleans(),
    st.complex_numbers(allow_nan=False),
    st.builds(
        lambda value, dtype: np.asarray(value).astype(dtype)[()], st.integers(0, 1), st.sampled_from(NUMBER_TYPES)
    ),
)
# What begins with slashes may be a placeholder of Flax's for an array elsewhere.
TEXTS = (st.text(max_size=40) | st.binary(max_size=40)).filter(lambda text: text[:2] not in ("//", b"//"))
TREES = st.dictionaries(
    st.text("ab/.é😀0", max_size=4),
    st.recursive(
        st.none() | ARRAYS | SCALARS | TEXTS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab.é0", max_size=4), inner, max_size=4),
        max_leaves=12,
    ),
    max_size=5,
)


def flat_values(tree, prefix=""):
    """(name, value) of all leaves and empty containers, as a reader names them."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        name = f"{prefix}{key}"
        if isinstance(value, (dict, list)) and value:
            yield from flat_values(value, f"{name}/")
        else:
            yield name, value


@pytest.mark.slow
@hypothesis.given(tree=TREES)
@hypothesis.settings(max_examples=hypothesis.settings.default.max_examples // 4)
def test_what_flax_writes_is_read_as_flax_reads_it(tmp_path_factory, tree):
    data = flax.serialization.msgpack_serialize(tree)
    theirs = list(flat_values(flax.serialization.msgpack_restore(data)))
    hypothesis.assume(len({name for name, _ in theirs}) == len(theirs))
    with open_bytes(tmp_path_factory.getbasetemp(), data) as checkpoint:
        assert checkpoint.leaves.keys() | checkpoint.empties.keys() == {name for name, _ in theirs}
        for name, expected in theirs:
            if expected is None or isinstance(expected, (dict, list)):
                assert checkpoint.empties[name] == expected
            elif isinstance(expected, (str, bytes)):
                found = checkpoint.leaves[name]
                assert (found.shape, found.dtype) == ((), object)
                assert found.get()[()] == (expected.encode() if isinstance(expected, str) else expected)
            else:
                wanted = np.asarray(expected)
                if isinstance(expected, int) and wanted.dtype == object:
                    wanted = np.array(expected, np.uint64)
                assert_same(checkpoint.leaves[name].get(), wanted)


@pytest.mark.parametrize("name", ["t5_1_1", "t5_1_0"])
def test_a_model_saved_by_transformers(goldens, name):
    directory = goldens / "flax_msgpack" / name
    with np.load(goldens / "flax_msgpack" / f"{name}_expected.npz") as expected:
        for path in (directory, directory / "flax_model.msgpack"):
            with ot.open_checkpoint(path) as checkpoint:
                assert (checkpoint.format, checkpoint.step) == ("flax_msgpack", None)
                assert checkpoint.leaves.keys() == set(expected.files)
                for leaf, lazy in checkpoint.leaves.items():
                    assert_same(lazy.get(), expected[leaf])
                assert checkpoint.metadata["config"] == json.loads((directory / "config.json").read_text())
                json.dumps(checkpoint.metadata)


def test_a_model_in_several_files(goldens, tmp_path):
    """The golden of Transformers, cut as its `flax_shard_checkpoint` cuts: a shard is a tree of some of the leaves."""
    golden = goldens / "flax_msgpack" / "t5_1_1"
    tree = flax.serialization.msgpack_restore((golden / "flax_model.msgpack").read_bytes())
    flat = flax.traverse_util.flatten_dict(tree, sep="/")
    FlaxIndexSuite().write(tmp_path, flat)
    (tmp_path / "config.json").write_bytes((golden / "config.json").read_bytes())
    index = tmp_path / "flax_model.msgpack.index.json"
    with ot.open_checkpoint(golden) as whole:
        for path in (tmp_path, index):
            with ot.open_checkpoint(path) as checkpoint:
                assert checkpoint.format == "flax_msgpack"
                assert checkpoint.metadata["index"] == {"total_size": 1}
                assert checkpoint.metadata["config"] == whole.metadata["config"]
                assert len(checkpoint.metadata["files"]) == 3
                assert checkpoint.leaves.keys() == whole.leaves.keys() == flat.keys()
                for name, lazy in checkpoint.leaves.items():
                    assert_same(lazy.get(), flat[name])
    with ot.open_checkpoint(tmp_path / "flax_model-00002-of-00003.msgpack") as shard:
        assert 0 < len(shard.leaves) < len(flat)


def test_a_train_state_of_flax(tmp_path):
    """What flax.training.checkpoints wrote in its own format: one file per step."""
    weights = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    state = {"step": 7, "params": {"w": weights}, "opt_state": {"0": None, "1": {}}}
    (tmp_path / "checkpoint_7").write_bytes(flax.serialization.to_bytes(state))
    with ot.open_checkpoint(tmp_path / "checkpoint_7") as checkpoint:
        assert (checkpoint.format, checkpoint.step) == ("flax_msgpack", 7)
        assert list(checkpoint.leaves) == ["params/w", "step"]
        assert dict(checkpoint.empties) == {"opt_state/0": None, "opt_state/1": {}}
        assert checkpoint.tree()["opt_state"] == {"0": None, "1": {}}
    mesh = jax.make_mesh((2,), ("x",))
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    target = {"params": {"w": jax.ShapeDtypeStruct((2, 3), np.float32, sharding=sharding)}, "step": 0}
    restored = ot.restore(tmp_path / "checkpoint_7", target)
    assert restored["step"] == 7
    assert restored["params"]["w"].sharding == sharding
    np.testing.assert_array_equal(restored["params"]["w"], weights)


def test_safetensors_come_first_in_a_directory_of_both(goldens, tmp_path):
    (tmp_path / "flax_model.msgpack").write_bytes(msgpack.packb({"w": 1}))
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    with ot.open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.format == "safetensors"
    with ot.open_checkpoint(tmp_path, format="flax_msgpack") as checkpoint:
        assert list(checkpoint.leaves) == ["w"]


CHILD = """
    import sys

    import numpy as np
    import orbax_t5x as ot
    from orbax_t5x.lazy import read_views

    def memory(field):
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))

    def begin():
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak begins anew
        return memory("VmRSS")

    before = begin()
    checkpoint = ot.open_checkpoint(sys.argv[1])
    opened = memory("VmHWM") - before
    before = begin()
    value = checkpoint.leaves["layer_1/w"].get()
    assert value.nbytes == 128 << 20 and not value.any()
    print(len(checkpoint.leaves), opened, memory("VmHWM") - before - value.nbytes, checkpoint.index_bytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_file_of_3_gib_opens_and_reads_in_little_memory(tmp_path):
    path = tmp_path / "checkpoint_1"
    shape, nbytes = (1 << 15, 1 << 10), 128 * MIB
    packed = msgpack.packb((shape, "float32")).replace(b"\x92", b"\x93", 1) + struct.pack(">BI", 0xC6, nbytes)
    extension = struct.pack(">BIb", 0xC9, len(packed) + nbytes, 1)
    with open(path, "wb") as file:  # of holes
        file.write(struct.pack(">BH", 0xDE, 24))
        for layer in range(24):
            file.write(msgpack.packb(f"layer_{layer}") + b"\x81" + msgpack.packb("w") + extension + packed)
            file.seek(nbytes, 1)
        file.truncate(file.tell())
    assert path.stat().st_size > 3 << 30
    command = [sys.executable, "-c", textwrap.dedent(CHILD), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    leaves, opened, beyond_the_leaf, index_bytes = map(int, done.stdout.split())
    assert leaves == 24
    assert index_bytes < MIB
    assert opened < 64 * MIB
    assert beyond_the_leaf < 64 * MIB


@pytest.mark.parametrize(
    "tree",
    [
        *({"": {"x": 1}, "y": 2}, {"": {"x": 1}, "x": 2}, {"": 3, "y": {"": 4}}, {"": {"": {"": 5}}}, {"": 6}),
        *({"": {"a": {"": 7}}, "b": [8, {"": 9}]}, {"a": {"": {"x": 1}, "x": 2}}),
    ],
)
def test_empty_keys_are_parts_of_names_as_flax_joins_them(tmp_path, tree):
    data = flax.serialization.msgpack_serialize(tree)
    restored = flax.serialization.msgpack_restore(data)
    state = flax.serialization.to_state_dict(restored)
    with open_bytes(tmp_path, data) as checkpoint:
        assert {name: leaf.get() for name, leaf in checkpoint.leaves.items()} == flax.traverse_util.flatten_dict(
            state, sep="/"
        )
        assert ot.restore(checkpoint, None) == state


def test_an_empty_map_under_an_empty_key_is_kept(tmp_path):
    with open_bytes(tmp_path, msgpack.packb({"": {}, "y": 2})) as checkpoint:
        assert checkpoint.tree()[""] == {} and list(checkpoint.leaves) == ["y"]
