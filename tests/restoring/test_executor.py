"""Every stored byte is read once, however many leaves, views and devices want it, and a plan counts what is read."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from unittest import mock

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_t5x as ot
from orbax_t5x.files.local_file import File
from orbax_t5x.lazy import repeat
from orbax_t5x.lazy.box import union_size
from orbax_t5x.lazy.several import concatenate, stack
from orbax_t5x.readers.tf_bundle.proto import Extent
from orbax_t5x.restoring.execute import buffers
from tests.support.array_strategies import boxes
from tests.support.bundle_writer import bundle_of
from tests.support.memory_checkpoint import AwaitedLeaf, checkpoint
from tests.support.placed_arrays import mesh, sharded, values

ARRAYS = {
    "a": np.arange(16 * 24, dtype=np.float32).reshape(16, 24),
    "b": -np.arange(16 * 24, dtype=np.float32).reshape(16, 24),
    "c": (np.arange(8 * 6 * 4) % 251).astype(ml_dtypes.bfloat16).reshape(8, 6, 4),
    "d": np.arange(40, dtype=np.int16),
    "e": np.array(7, np.float32),
}
# More than all elements of one array, so that a code says which array an element is of.
_STRIDE = 1000
_DTYPES = [np.dtype(name) for name in ("float32", "int16", "int32", "float16")] + [np.dtype(ml_dtypes.bfloat16)]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The same arrays in three formats, chunked where the format has chunks."""
    root = tmp_path_factory.mktemp("sources")
    safetensors.numpy.save_file(ARRAYS, root / "st")
    (root / "bundle").mkdir()
    bundle = bundle_of({name: array for name, array in ARRAYS.items() if name != "b"})
    bundle.add_sliced("b", ARRAYS["b"], [[Extent(0, 16), Extent(0, 10)], [Extent(0, 16), Extent(10, 14)]])
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        arguments = ocp.args.PyTreeSave(ARRAYS, save_args={name: ocp.SaveArgs(chunk_byte_size=256) for name in ARRAYS})
        checkpointer.save(root / "orbax", args=arguments)
    opened = {
        "safetensors": ot.open_checkpoint(root / "st"),
        "bundle": ot.open_checkpoint(bundle.write(root / "bundle")),
        "orbax": ot.open_checkpoint(root / "orbax"),
    }
    assert any(leaf.chunks and leaf.chunks != leaf.shape for leaf in _leaves(opened["orbax"]))
    return opened


def _leaves(source):
    return [view.leaf for view in source.leaves.values()]


@dataclasses.dataclass(frozen=True)
class Case:
    """A view, what NumPy makes of it, and which stored element each of its elements is."""

    view: object
    values: np.ndarray
    codes: np.ndarray

    def moved(self, function):
        return Case(function(self.view), np.asarray(function(self.values)), np.asarray(function(self.codes)))


def stored(source, name):
    array = ARRAYS[name]
    codes = np.arange(array.size).reshape(array.shape) + _STRIDE * list(ARRAYS).index(name)
    return Case(source.leaves[name], array, codes)


@st.composite
def cases(draw, source, *, steps: bool):
    """A random composition; with `steps`, also what reads more than it wants, in boxes that cover it."""
    case = stored(source, draw(st.sampled_from(list(ARRAYS))))
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["slice", "transpose", "stack", "concat", "cast", "repeat", "reshape"]))
        if kind == "slice":
            index = []
            for size in case.values.shape:
                start = draw(st.integers(0, max(0, size - 1)))
                step = draw(st.sampled_from([1, 1, 2, 3, -1])) if steps else 1
                index.append(slice(start, draw(st.integers(start, size)), step) if step > 0 else slice(start, None, -1))
            case = case.moved(lambda x, index=tuple(index): x[index])
        elif kind == "transpose":
            axes = draw(st.permutations(range(case.values.ndim)))
            case = case.moved(lambda x, axes=tuple(axes): x.transpose(axes))
        elif kind == "cast":
            dtype = draw(st.sampled_from(_DTYPES))
            with np.errstate(all="ignore"):
                case = Case(case.view.astype(dtype), case.values.astype(dtype), case.codes)
        elif kind == "repeat":
            axis = draw(st.integers(0, case.values.ndim))
            repeated = [np.repeat(np.expand_dims(x, axis), 2, axis) for x in (case.values, case.codes)]
            case = Case(repeat(case.view, 2, axis), *repeated)
        elif kind == "reshape":
            shape = draw(st.sampled_from([(-1,), (*case.values.shape[:1], -1), (-1, *case.values.shape[-1:])]))
            fits = math.prod(size for size in shape if size > 0) or 1
            if case.values.size and case.values.size % fits == 0 and steps:
                case = case.moved(lambda x, shape=shape: x.reshape(shape))
        else:
            other = case.moved(lambda x: x[::-1]) if case.values.ndim and draw(st.booleans()) else case
            if case.values.shape == (16, 24) and case.values.dtype == np.float32:
                other = stored(source, draw(st.sampled_from("ab")))
            together = (stack, np.stack) if kind == "stack" or not case.values.ndim else (concatenate, np.concatenate)
            axis = draw(st.integers(0, case.values.ndim - (together[0] is concatenate)))
            case = Case(
                together[0]([case.view, other.view], axis),
                together[1]([case.values, other.values], axis),
                together[1]([case.codes, other.codes], axis),
            )
    return case


@st.composite
def targets(draw, case):
    """What a case is restored into, as it is or cast without a loss: an array over some devices, or one on the host."""
    wider = {np.dtype(ml_dtypes.bfloat16): np.float32, np.dtype(np.float16): np.float32, np.dtype(np.int16): np.int32}
    dtype = case.values.dtype
    if draw(st.booleans()):
        dtype = np.dtype(wider.get(dtype, dtype))
    if not draw(st.integers(0, 3)):
        return np.zeros(case.values.shape, dtype)
    devices = np.asarray(jax.devices())
    mesh = Mesh((devices[::-1] if draw(st.booleans()) else devices).reshape(2, 4), ("x", "y"))
    spec, free = [], ["x", "y", ("x", "y")]
    for size in case.values.shape:
        fitting = [axis for axis in free if size % math.prod(mesh.shape[name] for name in axis) == 0]
        axis = draw(st.sampled_from([None, *fitting]))
        spec.append(axis)
        if axis is not None:
            free = [other for other in free if not set(other) & set(axis)]
    return jax.ShapeDtypeStruct(case.values.shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


@contextlib.contextmanager
def recorded_file_reads():
    """The byte ranges that are read of files meanwhile, and not served from a window that was read before."""
    reads = []
    original = File._fill

    def fill(self, fd, offset, buffers, leaf):
        reads.append((self.path, offset, offset + sum(buffer.nbytes for buffer in buffers)))
        return original(self, fd, offset, buffers, leaf)

    with mock.patch.object(File, "_fill", fill):
        yield reads


def restore_and_compare(source, wanted):
    """Restores the cases into their targets, and compares the values with NumPy's; returns the plan."""
    target = {f"t{place}": leaf for place, (_, leaf) in enumerate(wanted)}
    views = {f"t{place}": case.view for place, (case, _) in enumerate(wanted)}
    plan = ot.plan_restore(source, target, [lambda state, target: views], strict=False)
    with recorded_file_reads() as reads:
        got = plan.execute(memory_limit_bytes=1000)
    for place, (case, leaf) in enumerate(wanted):
        expected = case.values.astype(leaf.dtype)
        np.testing.assert_array_equal(np.asarray(got[f"t{place}"]), expected)
    assert plan.bytes_to_read == plan.report.bytes_read
    assert sum(stop - start for _, start, stop in reads) in (0, plan.report.bytes_read + plan.report.gap_bytes)
    if not plan.report.gap_bytes:
        ordered = sorted(reads)
        for (path, _, stop), (next_path, start, _) in itertools.pairwise(ordered):
            assert path != next_path or start >= stop, "a byte is read twice"
    return plan


def wanted_bytes(wanted):
    codes = np.unique(np.concatenate([case.codes.reshape(-1) for case, _ in wanted]))
    itemsizes = np.array([array.dtype.itemsize for array in ARRAYS.values()])
    return int(itemsizes[codes // _STRIDE].sum())


@pytest.mark.slow
@pytest.mark.parametrize("format", ["safetensors", "bundle", "orbax"])
@pytest.mark.parametrize("steps", [False, True])
@settings(
    max_examples=settings.default.max_examples // 5,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_each_stored_byte_is_read_once(sources, format, steps, data):
    source = sources[format]
    wanted = []
    for _ in range(data.draw(st.integers(1, 4))):
        case = data.draw(cases(source, steps=steps))
        wanted += [(case, data.draw(targets(case))) for _ in range(data.draw(st.integers(1, 2)))]
    # So little scratch that most casts go in many steps.
    with mock.patch("orbax_t5x.restoring.execute.groups.SCRATCH_BYTES", data.draw(st.sampled_from([64, 500, 1 << 24]))):
        plan = restore_and_compare(source, wanted)
    if steps:
        assert wanted_bytes(wanted) <= plan.bytes_to_read <= sum(array.nbytes for array in ARRAYS.values())
    else:
        assert plan.bytes_to_read == wanted_bytes(wanted)


class CallRecorder(AwaitedLeaf):
    """A leaf that records which boxes came in one call."""

    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        self.calls = []

    async def read_into(self, requests, stats):
        self.calls.append([box for box, _ in requests])
        await super().read_into(requests, stats)


@pytest.mark.parametrize("axes", [(0, 1), (1, 0)])
def test_a_chunk_is_read_in_one_step(axes):
    array = np.arange(48 * 40, dtype=np.float32).reshape(48, 40)
    leaf = CallRecorder("w", array, chunks=(16, 8))
    target = {"p": np.zeros(array.transpose(axes).shape, np.float64)}
    transform = [ot.transforms.Transpose(".*", axes), ot.transforms.Rename([("w", "p")])]
    with mock.patch("orbax_t5x.restoring.execute.groups.SCRATCH_BYTES", 700):
        got = ot.restore(checkpoint({"w": leaf}), target, transform)
    np.testing.assert_array_equal(got["p"], array.transpose(axes))
    reads = np.zeros((3, 5), int)
    for call in leaf.calls:
        touched = np.zeros(array.shape, bool)
        for (first, last), (left, right) in call:
            touched[first:last, left:right] = True
        reads += touched.reshape(3, 16, 5, 8).any(axis=(1, 3))
    assert len(leaf.calls) > 1 and (reads == 1).all()


def test_a_function_is_called_once_and_counts_whole():
    array = np.arange(64 * 8, dtype=np.float32).reshape(64, 8)
    calls = []

    def get():
        calls.append(1)
        return array

    def put(state, target):
        lazy = ot.LazyThreadPoolArray(array.shape, array.dtype, get)
        return {"p": lazy, "q": lazy, "constant": np.ones((3,), np.float32)}

    target = {"p": np.zeros(array.shape), "q": np.zeros(array.shape), "constant": np.zeros((3,), np.float32)}
    with mock.patch("orbax_t5x.restoring.execute.groups.SCRATCH_BYTES", 100):
        plan = ot.plan_restore(checkpoint({"w": array}), target, [put], strict=False)
        got = plan.execute()
    np.testing.assert_array_equal(got["p"], array)
    np.testing.assert_array_equal(got["q"], array)
    assert plan.bytes_to_read == plan.report.bytes_read == len(calls) * array.nbytes


def test_strings_of_a_variable_count_whole_as_stored(tmp_path):
    words = np.array([b"one", b"twenty", b"", b"three"], object)
    bundle = bundle_of({"words": words, "x": np.zeros((2,), np.float32)})
    source = ot.open_checkpoint(bundle.write(tmp_path))
    first, last = source.leaves["words"][:1], source.leaves["words"][3:]
    target = {"p": np.empty((1,), object), "q": np.empty((1,), object)}
    plan = ot.plan_restore(source, target, [lambda state, target: {"p": first, "q": last}], strict=False)
    got = plan.execute()
    assert got["p"].tolist() == [b"one"] and got["q"].tolist() == [b"three"]
    # A byte for each length, the checksum of the lengths, the text.
    assert plan.bytes_to_read == plan.report.bytes_read == len(words) + 4 + sum(map(len, words))


@given(data=st.data())
def test_the_size_of_boxes_together_is_what_a_mask_counts(data):
    shape = data.draw(st.lists(st.integers(0, 6), max_size=3).map(tuple))
    several = data.draw(st.lists(boxes(shape), max_size=6))
    mask = np.zeros(shape, bool)
    for box in several:
        mask[tuple(slice(*bounds) for bounds in box)] = True
    assert union_size(tuple(several)) == mask.sum()


@pytest.fixture
def awaited(monkeypatch):
    """The arrays whose transfers an execution awaits."""
    found = []
    ready = jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda arrays: (found.extend(arrays), ready(arrays))[1])
    return found


@pytest.mark.parametrize("backend", ["cpu", "tpu"])
def test_arrays_on_the_host_are_not_awaited_whatever_the_default_backend_is(monkeypatch, awaited, backend):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    stored = {"a": values((8, 4)), "b": values((8,))}
    ot.restore(checkpoint(stored), {"a": sharded((8, 4)), "b": np.zeros(8, np.float32)})
    assert awaited == []


def test_transfers_to_the_devices_of_the_target_are_awaited_whatever_the_default_backend_is(monkeypatch, awaited):
    # CPU devices stand in for those with memory of their own.
    monkeypatch.setattr(buffers, "_HOST_PLATFORMS", frozenset())
    stored = {"a": values((8, 4)), "b": values((8,))}
    restored = ot.restore(checkpoint(stored), {"a": sharded((8, 4)), "b": np.zeros(8, np.float32)})
    assert any(array is restored["a"] for array in awaited)
    awaited.clear()
    ot.restore(checkpoint(stored), {"a": np.zeros((8, 4), np.float32), "b": np.zeros(8, np.float32)})
    assert awaited == []


def test_a_leaf_without_a_sharding_goes_to_the_default_device(monkeypatch, awaited):
    target = {"a": jax.ShapeDtypeStruct((8,), np.float32)}
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    ot.restore(checkpoint({"a": values((8,))}), target)
    assert len(awaited) == 1
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        ot.restore(checkpoint({"a": values((8,))}), target)
    assert len(awaited) == 1


def test_each_box_is_read_once_however_many_devices_want_it(kind):
    source = checkpoint({"a": values((8, 4)), "b": values((8, 4))}, kind)
    ot.restore(source, {"a": sharded((8, 4)), "b": sharded((8, 4), spec=P(None, "x"), on=mesh((4, 2), ("y", "x")))})
    assert source.made["a"].boxes == [((0, 8), (0, 4))]
    assert sorted(source.made["b"].boxes) == [((0, 8), (0, 2)), ((0, 8), (2, 4))]


def test_two_targets_of_one_source_read_it_once(kind):
    source = checkpoint({"a": values((8, 4))}, kind)

    def twice(state, target):
        return {"x": state["a"], "y": state["a"]}

    got = ot.restore(source, {"x": sharded((8, 4)), "y": np.zeros((8, 4), np.float32)}, twice)
    np.testing.assert_array_equal(np.asarray(got["x"]), got["y"])
    assert source.made["a"].boxes == [((0, 8), (0, 4))]
