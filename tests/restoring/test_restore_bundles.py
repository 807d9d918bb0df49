"""What restores of bundles give, read and verify; of what is translated T5X's own importer is the oracle."""

import json
import shutil

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointError, CorruptCheckpointError
from orbax_t5x.trees.flat import flatten, unflatten
from tests.support.every_checkpoint import BUNDLES, bundle_values

TRANSLATED = BUNDLES[:5]
SPECS = {"rows": P("a"), "columns": P(None, "b"), "both": P("a", "b"), "replicated": P()}


@pytest.fixture(scope="module")
def meshes():
    devices = np.asarray(jax.devices())
    return {8: Mesh(devices.reshape(2, 4), ("a", "b")), 1: Mesh(devices[:1].reshape(1, 1), ("a", "b"))}


def fitting(mesh, spec, shape):
    """The spec, cut to the rank, without the axes that do not divide."""
    parts = [
        axis if axis is not None and shape[dimension] % mesh.shape[axis] == 0 else None
        for dimension, axis in enumerate(tuple(spec)[: len(shape)])
    ]
    return NamedSharding(mesh, P(*parts))


def target_leaf(value, mesh, spec):
    if value.dtype == object or (value.dtype.itemsize == 8 and value.dtype != np.complex64):
        return np.empty(value.shape, value.dtype)
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=fitting(mesh, spec, value.shape))


def nested(flat):
    return unflatten(flat)


def assert_bits(got, expected):
    got = np.asarray(got)
    assert got.dtype == expected.dtype and got.shape == expected.shape
    if expected.dtype == object:
        assert got.tolist() == expected.tolist()
    else:
        assert got.tobytes() == np.ascontiguousarray(expected).tobytes()


@pytest.mark.parametrize("name", BUNDLES)
def test_every_leaf_on_one_device(goldens, meshes, name):
    """On eight, and by each way to restore: `test_every_checkpoint.py`."""
    folder = goldens / "tf_bundle" / name
    expected = bundle_values(folder)
    target = {key: target_leaf(value, meshes[1], P("a", "b")) for key, value in expected.items()}
    got = ot.restore(folder, target)
    for key, value in expected.items():
        assert_bits(got[key], value)
        if isinstance(target[key], jax.ShapeDtypeStruct):
            assert got[key].sharding == target[key].sharding


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("name", TRANSLATED)
def test_translated_as_t5x_translates(goldens, meshes, name, spec):
    """Parameters, slots, placeholders and step are what T5X's own importer gives, through the handler too."""
    folder = goldens / "tf_bundle" / name
    leaves = json.loads((goldens / "importer" / f"{name}.json").read_text())["leaves"]
    values = np.load(goldens / "importer" / f"{name}.npz")
    dtypes = {key: np.dtype(getattr(ml_dtypes, leaf["dtype"], leaf["dtype"])) for key, leaf in leaves.items()}
    expected = {key: values[key].astype(dtype) for key, dtype in dtypes.items()}
    target = {
        key: jax.ShapeDtypeStruct(
            value.shape,
            np.int32 if value.dtype == np.int64 else value.dtype,
            sharding=fitting(meshes[8], spec, value.shape),
        )
        for key, value in expected.items()
    }
    tree = nested(target)
    ours = ot.restore(folder, tree, [ot.transforms.Translate()])
    arguments = ot.args.TrainStateRestore(tree, transforms=[ot.transforms.Translate()])
    with ocp.Checkpointer(ot.TrainStateHandler()) as checkpointer:
        through_orbax = checkpointer.restore(folder, args=arguments)
    for state in (ours, through_orbax):
        flat = flatten(state)
        assert set(flat) == set(expected)
        for key, value in expected.items():
            assert_bits(flat[key], value.astype(target[key].dtype))


def test_partial_reads_and_verification(goldens):
    """Rows of a leaf: their bytes and no more; the checksum stays open under "touched", and "full" reads the rest."""
    folder = goldens / "tf_bundle" / "t5_1_1_f32"
    name = "shared/embedding"
    whole = bundle_values(folder)[name]
    rows = {"rows": np.empty((2, *whole.shape[1:]), whole.dtype)}

    def first_rows(state, target):
        return {"rows": state["shared"]["embedding"][3:5]}

    plan = ot.plan_restore(folder, rows, first_rows)
    np.testing.assert_array_equal(plan.execute()["rows"], whole[3:5])
    wanted = 2 * whole[0].nbytes
    assert plan.report.bytes_read + plan.report.gap_bytes == wanted and plan.report.unverified == (name,)
    plan.execute(verify="full")
    assert plan.report.verified == (name,) and plan.report.bytes_read == whole.nbytes
    plan.execute(verify="off")
    assert plan.report.verified == plan.report.unverified == ()


def test_one_tower_reads_that_tower(goldens):
    folder = goldens / "tf_bundle" / "t5_1_1_f32"
    everything = ot.restore(folder, None, [ot.transforms.Translate()])
    tower = {"target": {"encoder": everything["target"]["encoder"]}}
    plan = ot.plan_restore(folder, tower, [ot.transforms.Translate()], strict=False)
    plan.execute()
    with ot.open_checkpoint(folder) as opened:
        wanted = sum(
            leaf.nbytes
            for name, leaf in opened.leaves.items()
            if name.startswith("encoder/") and "_slot_" not in name and "embedding" not in name
        )
    assert plan.report.bytes_read == plan.bytes_to_read == wanted
    assert plan.report.gap_bytes < 4096


def test_damage_names_file_and_leaf(goldens, tmp_path):
    folder = shutil.copytree(goldens / "tf_bundle" / "t5_1_1_f32", tmp_path / "bundle")
    with ot.open_checkpoint(folder) as opened:
        names = list(opened.leaves)
    data = max(folder.glob("*.data-*"), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 0x10
    data.write_bytes(content)
    with pytest.raises(CorruptCheckpointError) as caught:
        ot.restore(folder, None)
    assert caught.value.leaf in names and caught.value.path == str(data) and "crc32c" in str(caught.value)
    others = {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in leaves_of(folder) if name != caught.value.leaf}
    assert ot.restore(folder, others, strict=False)
    data.unlink()
    with pytest.raises(CheckpointError) as caught:
        ot.restore(folder, None)
    assert data.name in str(caught.value)


def leaves_of(folder):
    with ot.open_checkpoint(folder) as opened:
        return [(name, leaf) for name, leaf in opened.leaves.items()]
