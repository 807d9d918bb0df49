"""Checkpoints that T5X itself wrote (goldens), and ones of the same layout that TensorStore and Flax write here."""

import json
from functools import partial

import flax.serialization
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_t5x as ot
from orbax_t5x.adafactor import Adafactor
from orbax_t5x.cli.main import main
from orbax_t5x.optimizers import adamw
from orbax_t5x.state_utils import apply_assignment_map
from orbax_t5x.testing.leaf_reads import assert_same, leaf_of, read_boxes
from orbax_t5x.testing.reader_suite import NUMBERS, ReaderSuite
from orbax_t5x.train_state import FlaxOptimTrainState, InferenceState
from orbax_t5x.trees.flat import flatten, unflatten
from tests.support import t5_model
from tests.support.format_suites import STORED_BY_T5X, T5xGzipSuite, T5xSingleFileSuite, write_t5x
from tests.support.t5x_goldens import NATIVE, VARIANTS, golden, single_file


class TestGzip(T5xGzipSuite):
    pass


class TestZstdInChunks(ReaderSuite):
    dtypes = STORED_BY_T5X

    def write(self, directory, arrays):
        def chunks(shape):
            return [max(1, size // 4) for size in shape]

        return write_t5x(directory / "checkpoint_3", arrays, compressor={"id": "zstd", "level": 1}, chunks=chunks)


class TestRawWithSmallLeavesInline(ReaderSuite):
    dtypes = NUMBERS

    def write(self, directory, arrays):
        inline = [name for name, array in arrays.items() if array.size < 100]
        write_t5x(directory / "checkpoint_12", arrays, inline=inline)
        return directory


class TestChunksInDirectories(ReaderSuite):
    dtypes = STORED_BY_T5X

    def write(self, directory, arrays):
        def chunks(shape):
            return [max(1, size // 4) for size in shape]

        return write_t5x(directory / "checkpoint_3", arrays, chunks=chunks, dimension_separator="/")


class TestSingleFile(T5xSingleFileSuite):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NATIVE, *VARIANTS])
def test_what_t5x_wrote(name):
    """By each path all names and a third of the values."""
    root, step, values, empties = golden(name)
    for number, path in enumerate((root, step, step / "checkpoint")):
        with ot.open_checkpoint(path) as checkpoint:
            assert checkpoint.format == "t5x"
            assert checkpoint.step == int(step.name.removeprefix("checkpoint_"))
            assert checkpoint.leaves.keys() == values.keys()
            assert checkpoint.empties.keys() == empties.keys()
            for leaf, said in empties.items():
                assert (checkpoint.empties[leaf] is None) == said["none"]
            version = {"v2_uint16": 2, "version1": 1}.get(name, 3)
            assert checkpoint.metadata["version"] == version
            json.dumps(checkpoint.metadata)
            for leaf, expected in list(values.items())[number::3]:
                assert_same(checkpoint.leaves[leaf].get(), expected)
    assert ot.latest_step(root, validated=True) == checkpoint.step


def test_bfloat16_of_version_2_is_not_uint16():
    with ot.open_checkpoint(golden("v2_uint16").step) as checkpoint:
        dtypes = {name: lazy.dtype.name for name, lazy in checkpoint.leaves.items()}
        assert {dtype for name, dtype in dtypes.items() if name.startswith("target/")} == {"bfloat16"}
        metadata = json.loads((golden("v2_uint16").step / "target.decoder.decoder_norm.scale/.zarray").read_text())
        assert metadata["dtype"] == "<u2"


@pytest.mark.slow
def test_the_single_file_of_t5xs_public_test_data():
    theirs = flatten(flax.serialization.msgpack_restore(single_file().read_bytes())["optimizer"])
    with ot.open_checkpoint(single_file()) as checkpoint:
        assert (checkpoint.format, checkpoint.step) == ("t5x", 0)
        assert checkpoint.index_bytes < single_file().stat().st_size / 20
        assert checkpoint.leaves.keys() == theirs.keys()
        for name, expected in theirs.items():
            assert_same(checkpoint.leaves[name].get(), expected)


def mesh():
    return Mesh(np.asarray(jax.devices()).reshape(2, 4), ("x", "y"))


def test_a_box_reads_the_chunks_that_hold_it(tmp_path):
    """Of 16 chunks the two that the box meets: the others hold nothing that could be decoded."""
    value = np.random.default_rng(0).random((64, 64), np.float32)
    write_t5x(tmp_path / "checkpoint_1", {"target/w": value}, chunks=lambda shape: [16, 16])
    for path in (tmp_path / "checkpoint_1" / "target.w").iterdir():
        if path.name not in (".zarray", "1.1", "1.2"):
            path.write_bytes(b"not a chunk")
    with ot.open_checkpoint(tmp_path) as checkpoint:
        leaf = leaf_of(checkpoint, "target/w")
        assert leaf.chunks == (16, 16)
        reading = read_boxes(leaf, [((16, 32), (20, 40))])
        assert_same(reading.arrays[0], value[16:32, 20:40])
        with pytest.raises(ot.errors.CorruptCheckpointError):
            read_boxes(leaf, [((15, 32), (20, 40))])


def test_absent_chunks(tmp_path):
    """With a null fill value damage, with another that value, counted."""
    value = np.ones((8, 8), np.float32)
    for fill in (None, 0.0, 3.5):
        step = tmp_path / f"{fill}" / "checkpoint_1"
        write_t5x(step, {"w": value}, chunks=lambda shape: [4, 4], fill_value=fill, dtype="<f4")
        (step / "w" / "0.1").unlink()
        (step / "w" / "1.1").unlink()
        with ot.open_checkpoint(step) as checkpoint:
            leaf = leaf_of(checkpoint, "w")
            assert read_boxes(leaf, [((0, 8), (0, 4))]).stats.fill_chunks == 0
            if fill is None:
                with pytest.raises(ot.errors.CorruptCheckpointError) as caught:
                    read_boxes(leaf, [((0, 8), (0, 8))])
                assert caught.value.leaf == "w"
                continue
            reading = read_boxes(leaf, [((0, 8), (0, 8)), ((0, 1), (7, 8))])
            expected = value.copy()
            expected[:, 4:] = fill
            assert_same(reading.arrays[0], expected)
            assert reading.stats.fill_chunks == 2


def test_versions_and_steps(tmp_path):
    arrays = {"target/w": np.arange(3, dtype=np.float32), "state/step": np.int32(0)}
    assert ot.latest_step(tmp_path) is None
    for step, version in ((0, 0), (10, 1), (9, 2), (8, 3)):
        write_t5x(tmp_path / f"checkpoint_{step}", arrays, version=version, inline=["state/step"])
        assert ot.latest_step(tmp_path, validated=True) == max(step, 10 if step else 0)
    write_t5x(tmp_path / "checkpoint_11.tmp-1700000000", arrays)
    (tmp_path / "checkpoint_12").mkdir()
    for path, step, version in (
        (tmp_path, 10, 1),
        (tmp_path / "checkpoint_0", 0, 0),
        (tmp_path / "checkpoint_9", 9, 2),
        (tmp_path / "checkpoint_8" / "checkpoint", 8, 3),
    ):
        for format in (None, "t5x"):
            with ot.open_checkpoint(path, format=format) as checkpoint:
                assert (checkpoint.format, checkpoint.step, checkpoint.metadata["version"]) == ("t5x", step, version)
                assert list(checkpoint.leaves) == ["state/step", "target/w"]
                assert_same(checkpoint.leaves["target/w"].get(), arrays["target/w"])
    (tmp_path / "checkpoint_10" / "checkpoint").write_bytes(b"\x82\xa7version\x03\xa9optimizer")
    with pytest.warns(UserWarning, match="step 10 is skipped"):
        assert ot.latest_step(tmp_path, validated=True) == 9
    with pytest.raises(ot.errors.UnsupportedCheckpointError, match="no items"):
        ot.open_checkpoint(tmp_path / "checkpoint_9", item="state")


def states(name):
    """The train state that a golden holds, as a sharded target."""
    optimizers = {"d1_adamw": partial(adamw, 0.1), "d1_inference_params_only": None}
    make = optimizers.get(name, partial(Adafactor, 0.1))
    variables = t5_model.init()[1]
    state = InferenceState.create(variables) if make is None else FlaxOptimTrainState.create(make(), variables)
    return ot.with_shardings(
        jax.eval_shape(lambda: state), Mesh(np.asarray(jax.devices()).reshape(2, 4), ("data", "model"))
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["d1_adafactor", "d1_adamw", "d1_inference_params_only", "d8_adafactor_sds_smallchunks", "version1", "gcs_driver"],
)
def test_train_states(name):
    root, _, values, _ = golden(name)
    target = states(name)
    restored = ot.restore(root, target)
    assert type(restored) is type(target)
    flat = flatten(restored.state_dict())
    assert flat.keys() == values.keys()
    for leaf, value in flat.items():
        assert_same(np.asarray(value), values[leaf])
    inference = ot.restore(root, states("d1_inference_params_only"))
    assert_same(
        np.asarray(inference.params["encoder"]["encoder_norm"]["scale"]), values["target/encoder/encoder_norm/scale"]
    )


SWAP = [
    (r"(target|state/param_states)/(.*)/query/(.*)", r"\1/\2/key/\3"),
    (r"(target|state/param_states)/(.*)/key/(.*)", r"\1/\2/query/\3"),
]


@pytest.mark.slow
@pytest.mark.parametrize("function", [False, True])
def test_swaps(function):
    root, _, values, _ = golden("d1_adafactor")
    transform = partial(apply_assignment_map, assignment_map=SWAP) if function else ot.transforms.AssignmentMap(SWAP)
    restored = ot.restore(root, states("d1_adafactor"), [transform])
    for leaf, value in flatten(restored.state_dict()).items():
        other = leaf.replace("/query/", "/?/").replace("/key/", "/query/").replace("/?/", "/key/")
        assert_same(np.asarray(value), values[other])


def test_assignment_maps_renames_and_new_layers():
    root, _, values, _ = golden("d8_adafactor_sds_smallchunks")
    target = {"target": {"new": {"wi": jax.ShapeDtypeStruct((16, 32), np.float32)}, "kept": np.zeros(3, np.float32)}}
    rules = [(r"target/new/wi", r"target/encoder/layers_1/mlp/wi_0/kernel"), (r"target/kept", None)]
    restored = ot.restore(
        root,
        target,
        [ot.transforms.AssignmentMap(rules)],
        strict=False,
        fallback={"target": {"kept": np.ones(3, np.float32)}},
    )
    assert_same(np.asarray(restored["target"]["new"]["wi"]), values["target/encoder/layers_1/mlp/wi_0/kernel"])
    assert restored["target"]["kept"].tolist() == [1, 1, 1]


@pytest.mark.slow
def test_stacked_layers():
    root, _, values, _ = golden("d8_bf16")
    stack = ot.transforms.StackLayers(r"target/(encoder|decoder)/layers_(?P<i>\d+)/(.*)", r"target/\1/layers/\3", 1)
    name = "target/encoder/layers/mlp/wo/kernel"
    wanted = np.stack([values[f"target/encoder/layers_{layer}/mlp/wo/kernel"] for layer in range(2)], 1)
    sharding = NamedSharding(mesh(), P("x", None, "y"))
    target = unflatten({name: jax.ShapeDtypeStruct(wanted.shape, wanted.dtype, sharding=sharding)})
    restored = flatten(ot.restore(root, target, [stack], strict=False))[name]
    assert restored.sharding == sharding
    assert_same(np.asarray(restored), wanted)


@pytest.mark.slow
def test_a_scanned_model():
    config = t5_model.T5Config(scan_layers=True)
    unrolled = ot.restore(golden("d1_adafactor").root, states("d1_inference_params_only"))
    scanned = InferenceState.create(t5_model.init(config)[1])
    to_scanned = ot.rules.t5_minimal_to_scanned(config.heads, config.head_dim)
    restored = ot.restore(golden("d1_adafactor").root, jax.eval_shape(lambda: scanned), [to_scanned])
    jax.tree.map(np.testing.assert_array_equal, restored.params, t5_model.scanned_from(unrolled.params, config))


@pytest.mark.slow
def test_a_checkpointer_restores_a_step_directory():
    _, step, values, _ = golden("d1_adafactor")
    with ocp.Checkpointer(ot.TrainStateHandler()) as checkpointer:
        restored = checkpointer.restore(step, args=ot.args.TrainStateRestore(states("d1_adafactor")))
    for leaf, value in flatten(restored.state_dict()).items():
        assert_same(np.asarray(value), values[leaf])


@pytest.mark.slow
def test_converted_and_read_by_plain_orbax(tmp_path):
    root, _, values, empties = golden("d1_multi")
    ot.convert(root, tmp_path / "out")
    plain = ocp.PyTreeCheckpointer().restore(tmp_path / "out")
    found = flatten(plain)
    for leaf, value in values.items():
        assert_same(np.asarray(found[leaf]), value)
    assert {leaf for leaf, value in found.items() if value is None} == set(empties)


@pytest.mark.slow
def test_on_the_command_line(tmp_path, capsys):
    root = golden("d1_adafactor").root
    for command in (["inspect", root], ["plan", root], ["convert", root, tmp_path / "out"]):
        assert main([*map(str, command)]) == 0
        printed = capsys.readouterr().out
        if command[0] == "inspect":
            assert "t5x" in printed and "token_embedder" in printed
    assert ot.open_checkpoint(tmp_path / "out").format == "orbax"
