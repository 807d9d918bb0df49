"""Jobs of `multiprocess_worker` that restore with `broadcast=True`; several cases in one group of processes."""

import contextlib
from pathlib import Path

import jax
import numpy as np
import tensorstore as ts
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import orbax_t5x as ot
from orbax_t5x.trees.flat import flatten, unflatten

P = PartitionSpec


def mesh():
    """All devices: processes along "data", the devices of each along "model"."""
    return Mesh(np.asarray(jax.devices()).reshape(jax.process_count(), -1), ("data", "model"))


PLACINGS = {
    "replicated": lambda rank: P(),
    "data parallel": lambda rank: P(*[None] * (rank - 1), "model"),
    "rows": lambda rank: P("data"),
    "columns": lambda rank: P(*[None] * (rank - 1), ("data", "model")),
    "host": None,
}


def placed(shape, dtype, placing):
    """A leaf of a target; replicated where the shape does not divide, on the host where JAX has no such dtype."""
    spec = PLACINGS[placing]
    if spec is None or dtype.hasobject or dtype.itemsize == 8:
        return np.zeros(shape, dtype)
    for one in (spec(max(1, len(shape))), P()):
        with contextlib.suppress(ValueError, IndexError):
            sharding = NamedSharding(mesh(), one)
            sharding.shard_shape(shape)
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    raise AssertionError(shape)


def check_equal(restored, expected):
    """Every element of every shard, bit for bit."""
    flat = flatten(restored)
    assert sorted(flat) == sorted(expected)
    for name, value in flat.items():
        whole = expected[name]
        if isinstance(value, jax.Array):
            if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
                value = jax.random.key_data(value)
            for shard in value.addressable_shards:
                assert np.asarray(shard.data).tobytes() == whole[shard.index].tobytes(), name
        elif whole.dtype.hasobject:
            assert np.asarray(value, object).tolist() == whole.tolist(), name
        else:
            assert np.asarray(value).tobytes() == whole.tobytes(), name


def file_bytes():
    """What TensorStore has read from files."""
    name = "/tensorstore/kvstore/file/bytes_read"
    return sum(one["values"][0]["value"] for one in ts.experimental_collect_matching_metrics(name))


def restored(source, target, transforms=(), **keywords):
    """A state, and what it took to restore it."""
    plan = ot.plan_restore(source, target, transforms)
    before = file_bytes()
    state = plan.execute(broadcast=True, **keywords)
    told = {
        "read": plan.report.bytes_read,
        "received": plan.report.bytes_received,
        "needed": plan.bytes_to_read,
        "verified": len(plan.report.verified),
        "from files": file_bytes() - before,
    }
    return state, told


def every_placing(folder):
    """Each checkpoint of a folder, in each placing, with a large and with the least budget."""
    arrays = dict(np.load(Path(folder) / "arrays.npz"))
    told = {}
    for name in ("bundle", "safetensors", "orbax"):
        source = (Path(folder) / f"{name}.path").read_text()
        with ot.open_checkpoint(source) as opened:
            kinds = {key: (leaf.shape, leaf.dtype) for key, leaf in opened.leaves.items()}
            expected = {key: arrays.get(key.replace("/", "."), leaf) for key, leaf in opened.leaves.items()}
            expected = {key: value if isinstance(value, np.ndarray) else value.get() for key, value in expected.items()}
        for placing in PLACINGS:
            target = unflatten({key: placed(*kind, placing) for key, kind in kinds.items()})
            state, told[f"{name}, {placing}"] = restored(source, target)
            check_equal(state, expected)
        for limit in (1, 1 << 20):
            target = unflatten({key: placed(*kind, "data parallel") for key, kind in kinds.items()})
            state, told[f"{name}, {limit}"] = restored(source, target, memory_limit_bytes=limit)
            check_equal(state, expected)
    return told
