"""Jobs of `multiprocess_worker` that restore with `broadcast=True`; several cases in one group of processes."""

import contextlib
import ctypes
import gc
import os
from pathlib import Path

import jax
import numpy as np
import tensorstore as ts
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import orbax_t5x as ot
from orbax_t5x.readers.ranges.leaf import ByteRangeLeaf
from orbax_t5x.restoring.broadcast import send as broadcast
from orbax_t5x.trees.flat import flatten, unflatten
from tests.multihost.jobs import multiprocess_worker as worker

P = PartitionSpec
# What of a large array one process is not to read, so that both read something of it before.
_ROW = 700


def mesh():
    """All devices: processes along "data", the devices of each along "model"."""
    return Mesh(np.asarray(jax.devices()).reshape(jax.process_count(), -1), ("data", "model"))


PLACINGS = {
    "replicated": lambda rank: P(),
    "data parallel": lambda rank: P(*[None] * (rank - 1), "model"),
    "rows": lambda rank: P("data"),
    "all rows": lambda rank: P(("data", "model")),
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
        "read": plan.report.bytes_read + plan.report.gap_bytes,
        "received": plan.report.bytes_received,
        "needed": plan.bytes_to_read,
        "verified": len(plan.report.verified),
        "from files": file_bytes() - before,
    }
    return state, told


def each_way(folder):
    """Each store by each way of reading: what was decided before, and what was read and received."""
    arrays = dict(np.load(Path(folder) / "arrays.npz"))
    told = {}
    for name in ("safetensors", "orbax"):
        source = (Path(folder) / f"{name}.path").read_text()
        with ot.open_checkpoint(source) as opened:
            leaf = opened.leaves["layers/large"]
        expected = {"layers/large": arrays["layers.large"]}
        for store in ("local", "shared", "bucket"):
            os.environ["ORBAX_T5X_STORE"] = store
            for placing in ("replicated", "all rows", "columns"):
                target = {"layers": {"large": placed(leaf.shape, leaf.dtype, placing)}}
                for way in ("auto", True, False):
                    plan = ot.plan_restore(source, target, strict=False)
                    before = plan.to_json()["broadcast"]
                    check_equal(plan.execute(broadcast=way), expected)
                    after = plan.to_json()["broadcast"]
                    report = plan.report
                    told[f"{name}, {store}, {placing}, {way}"] = {
                        "decided": before,
                        "is the same after": before == after,
                        "text": "read once and sent" in " ".join(str(plan).split()),
                        "explained": "read once and sent" in " ".join(plan.explain("layers/large").split()),
                        "read": report.bytes_read + report.gap_bytes,
                        "received": report.bytes_received,
                    }
    del os.environ["ORBAX_T5X_STORE"]
    return told


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


# -- failures


class Recorded:
    """What restores of one process told: "ok", or the error's type, its leaf and what matters of its text."""

    def __init__(self):
        self.told = []

    def attempt(self, source, target, **keywords):
        try:
            ot.restore(source, target, broadcast=True, **keywords)
            self.told.append("ok")
        except ot.errors.CheckpointError as error:
            self.told.append([type(error).__name__, error.leaf, "process 1" in str(error)])
        except (ValueError, RuntimeError) as error:
            self.told.append([type(error).__name__])


@contextlib.contextmanager
def patched(owner, name, value):
    real = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield real
    finally:
        setattr(owner, name, real)


def failures(folder):
    """One process fails in one way after the other; then all restore together."""
    folder = Path(folder)
    source = (folder / "safetensors.path").read_text()
    with ot.open_checkpoint(source) as opened:
        target = unflatten({key: placed(leaf.shape, leaf.dtype, "replicated") for key, leaf in opened.leaves.items()})
    small = {"memory_limit_bytes": 1}  # many rounds
    recorded = Recorded()
    is_second = jax.process_index() == 1

    # A leaf that one process alone cannot read.
    real = ByteRangeLeaf.read_blocking

    def refused(leaf, requests, stats):
        if is_second and leaf.name == "layers/large" and any(request.box[0][0] > _ROW for request in requests):
            raise ot.errors.CheckpointIOError("refused", path=leaf.path, leaf=leaf.name, errno=5)
        real(leaf, requests, stats)

    with patched(ByteRangeLeaf, "read_blocking", refused):
        recorded.attempt(source, target, **small)
    # A checkpoint that one process has closed.
    with ot.open_checkpoint(source) as opened:
        plan = ot.plan_restore(opened, target)
        if is_second:
            opened.close()
        try:
            plan.execute(broadcast=True)
        except (ot.errors.CheckpointError, ValueError) as error:
            recorded.told.append([type(error).__name__])

    # A function of a caller.
    def progress(done, total, leaf):
        if is_second:
            raise RuntimeError("no more")

    recorded.attempt(source, target, progress=progress, **small)
    # Damage, where all processes read together what the checksum covers, and in a chunk.
    recorded.attempt((folder / "damaged bundle.path").read_text(), target, strict=False)
    recorded.attempt((folder / "damaged orbax.path").read_text(), target)
    # Processes that want different things.
    recorded.attempt(source, target if is_second else {"small": target["small"]}, strict=False)
    try:
        ot.restore(source, target, broadcast=is_second)
    except ot.errors.RestorePlanError:
        recorded.told.append("differ")
    recorded.attempt(source, target)
    return recorded.told


def _counting(number, then):
    """The exchange of send buffers, with something else to do before one of them."""
    real, calls = broadcast.exchange_buffers, []

    def exchange_buffers(*arguments):
        calls.append(arguments)
        if len(calls) == number:
            then()
        return real(*arguments)

    return patched(broadcast, "exchange_buffers", exchange_buffers)


def restore_where_one_dies(source):
    """The second process is killed between two rounds."""
    with ot.open_checkpoint(source) as opened:
        target = unflatten({key: placed(leaf.shape, leaf.dtype, "replicated") for key, leaf in opened.leaves.items()})
    with _counting(20, worker.die if jax.process_index() == 1 else lambda: None):
        ot.restore(source, target, broadcast=True, memory_limit_bytes=1)


# -- what is made on the way


def transformed(folder):
    """Casts, stacks, slices, keys, scalars and what a fallback gives, beside NumPy."""
    arrays = dict(np.load(Path(folder) / "arrays.npz"))
    layers = np.load(Path(folder) / "layers.npy")
    key_data = np.load(Path(folder) / "key.npy")
    source = (Path(folder) / "orbax.path").read_text()
    stack = ot.transforms.StackLayers(r"steps/(?P<i>\d+)/(.*)", r"stacked/\2", 1)
    rename = ot.transforms.Rename([("layers/large", "wide/large")])
    cast = ot.transforms.Cast("wide/large", np.float64)
    pad = ot.transforms.Pad("small", (4,), ot.transforms.FALLBACK)
    rows = NamedSharding(mesh(), P("data"))
    whole = NamedSharding(mesh(), P())
    target = {
        "stacked": {"w": jax.ShapeDtypeStruct((64, 4, 48), np.float32, sharding=rows)},
        "wide": {"large": np.zeros(arrays["layers.large"].shape, np.float64)},
        "key": jax.ShapeDtypeStruct((), jax.random.key(0).dtype, sharding=whole),
        "count": 0,
        "small": jax.ShapeDtypeStruct((4,), np.float32, sharding=whole),
        "new": jax.ShapeDtypeStruct((8,), np.float32, sharding=rows),
        "given": jax.ShapeDtypeStruct((8,), np.float32, sharding=rows),
        "host": np.zeros(2),
        "long": np.zeros(2, np.int64),
        "step": jax.ShapeDtypeStruct((), np.int32, sharding=whole),
    }

    def initialize():
        return {
            "small": jax.numpy.full(4, 2.5),
            "new": jax.numpy.arange(8.0),
            "given": np.arange(8, dtype=np.float32),
            "host": jax.numpy.full(2, 1.5),
            "long": np.full(2, 2**40),
            "step": np.int64(7),
        }

    plan = ot.plan_restore(source, target, [stack, rename, cast, pad], fallback=initialize, strict=False)
    before = file_bytes()
    state = plan.execute(broadcast=True)
    with np.errstate(invalid="ignore"):
        large = arrays["layers.large"].astype(np.float64)
    expected = {
        "stacked/w": np.stack(list(layers), 1),
        "wide/large": large,
        "key": key_data,
        "small": np.array([*arrays["small"], 2.5], np.float32),
        "new": np.arange(8, dtype=np.float32),
        "given": np.arange(8, dtype=np.float32),
        "host": np.full(2, 1.5),
        "long": np.full(2, 2**40),
        "step": np.int32(7),
    }
    count = state.pop("count")
    assert type(count) is int and count == int(arrays["count"])
    check_equal(state, expected)
    return {"read": plan.report.bytes_read, "from files": file_bytes() - before}


def memory(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name)) << 10


# Of malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def peak(folder):
    """What a restore of one large array takes beside the array."""
    # By itself the allocator keeps buffers of this size for the threads that had them, now more, now less.
    for parameter in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
        assert ctypes.CDLL(None).mallopt(parameter, 65536)
    source = (Path(folder) / "large.path").read_text()
    target = {"small": placed((8,), np.dtype(np.float32), "replicated")}
    limit = 32 << 20
    ot.restore(source, target, broadcast=True, strict=False, memory_limit_bytes=limit)  # what is made only once
    with ot.open_checkpoint(source) as opened:
        shape = opened.leaves["large"].shape
    target = {"large": placed(shape, np.dtype(np.float32), "data parallel")}
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    state = ot.restore(source, target, broadcast=True, strict=False, memory_limit_bytes=limit)
    result = sum(shard.data.nbytes for shard in state["large"].addressable_shards)
    return {"beside": memory("VmHWM") - before - result, "limit": limit, "result": result}
