"""Every checkpoint that somebody else wrote, by each way to restore it: bit for bit what its writer said that it holds.

The leaves of a target have four shardings in turn. `ot.restore` gives each leaf each of them, Orbax's ways one.
"""

import functools
import itertools

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_t5x as ot
from orbax_t5x.testing.leaf_reads import assert_same
from tests.support.every_checkpoint import EVERY_CHECKPOINT, stored

SHARDINGS = {
    "replicated": lambda shape: (),
    "first dimension": lambda shape: ("a",),
    "last dimension": lambda shape: (*[None] * (len(shape) - 1), "b"),
    "both": lambda shape: ("a", *[None] * (len(shape) - 2), "b"),
}


@functools.cache
def mesh() -> Mesh:
    return Mesh(np.asarray(jax.devices()).reshape(2, 4), ("a", "b"))


def sharding_of(name, shape):
    """Without the axes that do not divide the shape."""
    axes = SHARDINGS[name](shape)[: len(shape)]
    fitting = [
        axis if axis and size % mesh().shape[axis] == 0 else None for axis, size in zip(axes, shape, strict=False)
    ]
    return NamedSharding(mesh(), P(*fitting))


def target_leaf(value, sharding):
    """Abstract; of texts and of types of 64 bits, which JAX's arrays do not have here, an array of the host."""
    if value.dtype == object or (value.dtype.itemsize == 8 and value.dtype != np.complex64):
        return np.empty(value.shape, value.dtype)
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding_of(sharding, value.shape))


@pytest.fixture(scope="module")
def run_of_its_own(tmp_path_factory):
    """A run with a step, in which a manager restores what lies elsewhere."""
    root = tmp_path_factory.mktemp("run")
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False, step_prefix="checkpoint")
    with ocp.CheckpointManager(root, options=options) as manager:
        manager.save(0, args=ocp.args.Composite(state=ocp.args.PyTreeSave({"w": np.zeros(2)})))
    return root


def by_restore(path, target, own):
    return ot.restore(path, target)


def by_checkpointer(path, target, own):
    """Orbax takes directories alone for checkpoints; a file is restored by `source=`."""
    directory, source = (path, None) if path.is_dir() else (own / "checkpoint_0" / "state", path)
    with ocp.Checkpointer(ot.TrainStateHandler()) as checkpointer:
        return checkpointer.restore(directory, args=ot.args.TrainStateRestore(target, source=source))


def by_manager(path, target, own):
    """T5X's roots of Orbax steps are a manager's; of others a manager restores by `source=`."""
    is_root = "t5x_orbax" in str(path)
    options = ocp.CheckpointManagerOptions(step_prefix="checkpoint", read_only=True)
    handlers = {"state": ot.TrainStateHandler()}
    with ocp.CheckpointManager(path if is_root else own, item_handlers=handlers, options=options) as manager:
        args = ot.args.TrainStateRestore(target, source=None if is_root else path)
        return manager.restore(manager.latest_step(), args=ocp.args.Composite(state=args))["state"]


@pytest.mark.slow
@pytest.mark.parametrize("way", [by_restore, by_checkpointer, by_manager])
@pytest.mark.parametrize("name", EVERY_CHECKPOINT)
def test_bit_for_bit(name, way, run_of_its_own):
    path, values = stored(name)
    assert values
    for turn in range(len(SHARDINGS)) if way is by_restore else (0,):
        shardings = itertools.islice(itertools.cycle(SHARDINGS), turn, None)
        target = {leaf: target_leaf(value, next(shardings)) for leaf, value in values.items()}
        restored = way(path, target, run_of_its_own)
        assert restored.keys() == values.keys()
        for leaf, value in values.items():
            assert_same(np.asarray(restored[leaf]), value)
            if isinstance(target[leaf], jax.ShapeDtypeStruct):
                assert restored[leaf].sharding == target[leaf].sharding


@pytest.mark.slow
def test_shardings_split_what_they_can():
    """Of all leaves together, so that a test above cannot pass with everything replicated."""
    for sharding in ("first dimension", "last dimension", "both"):
        for kind in ("tf_bundle/t5_1_1_f32", "t5x_native/d1_adafactor", "safetensors/t5_1_1", "t5x_orbax/d8_adafactor"):
            shapes = [value.shape for value in stored(kind).values.values() if value.ndim > 1]
            split = [shape for shape in shapes if not sharding_of(sharding, shape).is_fully_replicated]
            assert len(split) > len(shapes) / 2
