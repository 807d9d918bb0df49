"""T5X's get_fn kinds, values in memory as leaves, and reading: with loops, threads, forks and failures about."""

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import orbax_t5x as ot
from orbax_t5x import lazy
from orbax_t5x.errors import LeafMismatchError
from orbax_t5x.lazy import as_view, several
from orbax_t5x.testing.array_leaf import ArrayLeaf

# T5X's kinds.


class Counter:
    """A get_fn that counts its calls and the threads that made them."""

    def __init__(self, value):
        self.value = value
        self.threads = []

    def __call__(self):
        self.threads.append(threading.current_thread())
        return self.value


class Awaited(Counter):
    async def __call__(self):
        await asyncio.sleep(0)
        return super().__call__()


def test_the_base_class_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        ot.LazyArray((2,), np.float32, lambda: None)


@pytest.mark.parametrize("kind, fn", [(ot.LazyThreadPoolArray, Counter), (ot.LazyAwaitableArray, Awaited)])
def test_get_fn_kinds_know_their_shape_and_call_only_when_asked(kind, fn):
    value = np.arange(6, dtype=np.float32).reshape(2, 3)
    call = fn(value)
    array = kind((2, 3), np.float32, call)
    assert (array.shape, array.dtype, array.ndim, array.size, array.nbytes) == ((2, 3), np.float32, 2, 6, 24)
    assert repr(array) == f"{kind.__name__}(shape=(2, 3), dtype=float32)"
    half = array.astype(jnp.bfloat16)
    assert type(half) is kind and half.dtype == ml_dtypes.bfloat16 and half.nbytes == 12 and array.dtype == np.float32
    assert kind((), np.int64, call).nbytes == 8 and kind((0, 3), np.int64, call).size == 0
    assert not call.threads
    assert array.get() is value
    got = half.get()
    assert got.dtype == ml_dtypes.bfloat16 and got.tolist() == value.tolist()
    assert len(call.threads) == 2

    async def both():
        return await asyncio.gather(array.get_async(), half.get_async())

    first, second = asyncio.run(both())
    assert first is value and second.dtype == ml_dtypes.bfloat16 and len(call.threads) == 4


def test_a_blocking_function_does_not_block_the_loop():
    called, gate = threading.Event(), threading.Event()

    def wait_for_the_gate():
        called.set()
        return gate.wait(30) and np.float32(5)

    array = ot.LazyThreadPoolArray((), np.float32, wait_for_the_gate)

    async def read():
        task = asyncio.ensure_future(array.get_async())
        await asyncio.to_thread(called.wait, 30)
        assert called.is_set() and not task.done()
        gate.set()
        return float(await task)

    assert asyncio.run(read()) == 5.0


def test_the_pool_of_blocking_functions_is_an_attribute_of_the_class():
    assert ot.LazyThreadPoolArray.executor is ot.LazyThreadPoolArray((), np.int8, int).executor
    with ThreadPoolExecutor(1, thread_name_prefix="own") as pool:

        class Own(ot.LazyThreadPoolArray):
            executor = pool

        call = Counter(np.zeros(2))
        asyncio.run(Own((2,), np.float64, call).get_async())
        asyncio.run(ot.LazyThreadPoolArray((2,), np.float64, call).get_async())
    own, shared = call.threads
    assert own.name.startswith("own") and not shared.name.startswith("own")


def test_an_awaitable_array_reads_inside_a_running_loop_and_from_within_another_read():
    inner = ot.LazyAwaitableArray((2,), np.float32, Awaited(np.ones(2, np.float32)))

    async def outer_fn():
        return inner.get() + as_view(np.ones(2, np.float32)).get()

    outer = ot.LazyAwaitableArray((2,), np.float32, outer_fn)

    async def main():
        return outer.get().tolist()

    assert asyncio.run(main()) == outer.get().tolist() == [2.0, 2.0]


def test_from_array_takes_shape_and_dtype():
    array = ot.LazyAwaitableArray.from_array(np.zeros((3, 1), np.int8), Awaited(np.ones((3, 1))))
    assert (array.shape, array.dtype, array.get().dtype) == ((3, 1), np.int8, np.int8)


@pytest.mark.parametrize(
    "metadata, shape, dtype",
    [
        ({"shape": [4, 2], "dtype": "<f4"}, (4, 2), "float32"),
        ({"shape": [4], "dtype": "bfloat16"}, (4,), "bfloat16"),
        ({"shape": [], "dtype": "|b1"}, (), "bool"),
        ({"shape": [3], "dtype": "<u2"}, (3,), "uint16"),
        ({"shape": [3], "data_type": "int4"}, (3,), "int4"),
        ({"dimensions": [5], "dataType": "float64"}, (5,), "float64"),
    ],
)
def test_a_spec_gives_shape_and_dtype_and_uint16_stays_itself(metadata, shape, dtype):
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": "/nowhere"}, "metadata": metadata}
    for make in (ot.LazyAwaitableArray.from_tensor_store_spec, ot.LazyAwaitableArray.from_tensor_store_spec_or_array):
        array = make(spec, Awaited(None))
        assert (array.shape, array.dtype) == (shape, np.dtype(getattr(ml_dtypes, dtype, dtype)))


def test_a_tensorstore_spec_object_is_read_through_its_future(tmp_path):
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{tmp_path}/x/"}}
    store = ts.open(spec, create=True, dtype=ts.bfloat16, shape=[2, 3]).result()
    store[...] = np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16)
    array = ot.LazyAwaitableArray.from_tensor_store_spec(store.spec(), store.read)
    assert (array.shape, array.dtype) == ((2, 3), ml_dtypes.bfloat16)
    assert array.get().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert ot.LazyAwaitableArray.from_tensor_store_spec_or_array(store.spec(), store.read).shape == (2, 3)
    assert ot.LazyAwaitableArray.from_tensor_store_spec_or_array(np.zeros(7), store.read).shape == (7,)


def test_bits_of_bfloat16_in_uint16_are_reinterpreted_only_when_said():
    stored = np.array([1.5, -2.0], ml_dtypes.bfloat16)
    spec = {"driver": "zarr", "kvstore": {"driver": "memory"}, "metadata": {"shape": [2], "dtype": "<u2"}}
    bits = Awaited(stored.view(np.uint16))
    array = ot.LazyAwaitableArray.from_tensor_store_spec(spec, bits, bfloat16_as_uint16=True)
    assert array.dtype == ml_dtypes.bfloat16 and array.get().tolist() == [1.5, -2.0]
    assert array.astype(np.float32).get().tolist() == [1.5, -2.0]
    assert ot.LazyAwaitableArray.from_tensor_store_spec(spec, bits).get().tolist() == stored.view(np.uint16).tolist()


@pytest.mark.parametrize("metadata", [{}, {"shape": [2]}, {"dtype": "<f4"}])
def test_a_spec_without_shape_or_dtype_is_an_error(metadata):
    with pytest.raises(ValueError, match="records no"):
        ot.LazyAwaitableArray.from_tensor_store_spec({"driver": "zarr", "metadata": metadata}, Awaited(None))


def test_a_given_dtype_overrides_that_of_a_spec_or_an_array():
    """As T5X's Checkpointer calls these: by keyword, with None where it restores what is stored."""
    value = np.array([1.5, 2.5], np.float32)
    spec = {"driver": "zarr", "kvstore": {"driver": "memory"}, "metadata": {"shape": [2], "dtype": "<f4"}}
    kind = ot.LazyAwaitableArray
    for make, described in (
        (kind.from_array, value),
        (kind.from_tensor_store_spec, spec),
        (kind.from_tensor_store_spec_or_array, spec),
        (kind.from_tensor_store_spec_or_array, value),
    ):
        for dtype, expected in ((None, np.float32), ("float16", np.float16), (jnp.bfloat16, ml_dtypes.bfloat16)):
            for array in (make(described, Awaited(value), dtype=dtype), make(described, Awaited(value), dtype)):
                assert (array.shape, array.dtype) == ((2,), expected)
                got = array.get()
                assert got.dtype == expected and got.tolist() == [1.5, 2.5]


def test_a_given_dtype_says_nothing_of_the_stored_bits():
    stored = np.array([1.5, -2.0], ml_dtypes.bfloat16)
    spec = {"driver": "zarr", "kvstore": {"driver": "memory"}, "metadata": {"shape": [2], "dtype": "<u2"}}
    bits = Awaited(stored.view(np.uint16))
    make = ot.LazyAwaitableArray.from_tensor_store_spec
    assert make(spec, bits, np.float32, bfloat16_as_uint16=True).get().tolist() == [1.5, -2.0]
    assert make(spec, bits, np.float32).get().tolist() == stored.view(np.uint16).tolist()
    without_dtype = {**spec, "metadata": {"shape": [2]}}
    assert make(without_dtype, Awaited(np.ones(2)), np.int8).get().tolist() == [1, 1]


# As views.


def test_a_get_fn_array_becomes_a_view_that_reads_whole_once():
    call = Counter(np.arange(6, dtype=np.float32).reshape(2, 3))
    view = as_view(ot.LazyThreadPoolArray((2, 3), np.float32, call), "kernel")
    assert view.shape == (2, 3) and not view.is_value and view.leaves()[0].name == "kernel"
    both = several.stack([view[1], view[0]]).T
    assert not call.threads
    assert both.get().tolist() == [[3, 0], [4, 1], [5, 2]]
    assert len(call.threads) == 1
    awaited = as_view(ot.LazyAwaitableArray((2, 3), np.float32, Awaited(call.value)))
    assert awaited[:, ::-1].get().tolist() == [[2, 1, 0], [5, 4, 3]]


def test_a_function_that_gives_another_shape_or_dtype_is_found_out():
    view = as_view(ot.LazyThreadPoolArray((2, 3), np.float32, lambda: np.zeros((3, 2), np.float32)), "kernel")
    with pytest.raises(LeafMismatchError, match=r"leaf 'kernel': declared as float32 of shape \(2, 3\).*\(3, 2\)"):
        view.get()

    class Own(ot.LazyArray):
        def get(self):
            return self._get_fn()

        async def get_async(self):
            return self._get_fn()

    with pytest.raises(LeafMismatchError, match="float64"):
        as_view(Own((2,), np.float32, lambda: np.zeros(2))).get()


@pytest.mark.parametrize("value", [3, 2.5, True, 1 + 2j, np.int8(4), np.float32(0.5), np.arange(6).reshape(2, 3)])
def test_values_are_views_that_know_that_they_are_constant(value):
    view = as_view(value, "x")
    assert view.is_value and view.value is value and view.leaves()[0].name == "x"
    assert view.dtype == np.asarray(value).dtype
    np.testing.assert_array_equal(view.get(), value)
    doubled = several.stack([view, view])
    assert doubled.is_value
    np.testing.assert_array_equal(doubled.value, np.stack([value, value]))
    leaf = as_view(ArrayLeaf(np.asarray(value)))
    assert not leaf.is_value and not several.stack([view, leaf]).is_value


def test_text_is_an_object_leaf_of_bytes_or_str():
    for text in (b"ab\x00", "ab"):
        assert as_view(text).dtype == object and as_view(text).get()[()] == text
    assert as_view(np.array(["a", "bc"])).get().tolist() == ["a", "bc"]


def test_what_is_no_array_is_refused():
    for value in (None, ..., {"a": 1}, object()):
        with pytest.raises(TypeError, match="is no array"):
            as_view(value)
    with pytest.raises(TypeError, match="key_data"):
        as_view(jax.random.key(0))


@pytest.mark.parametrize("spec", [("x", "y"), ("y",), (None, "x"), (("x", "y"),), ()])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4", "bool"])
def test_sharded_arrays_are_read_box_by_box(spec, dtype):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    array = np.arange(64).reshape(8, 8).astype(getattr(ml_dtypes, dtype, dtype))
    value = jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))
    view = as_view(value)
    assert view.dtype == array.dtype and view.is_value and view.value is value
    assert view.get().tobytes() == array.tobytes()
    out = np.zeros((3, 5), array.dtype)
    lazy.read_views([(view.T, ((2, 5), (1, 6)), out)])
    assert out.tobytes() == array.T[2:5, 1:6].tobytes()
    assert as_view(jnp.ones(())).get() == 1.0 and as_view(jnp.zeros((0, 3)))[:, 1].get().shape == (0,)


def test_a_sharded_value_keeps_no_copy_on_the_host_of_shards_that_no_box_touches():
    mesh = Mesh(np.array(jax.devices()), ("x",))
    value = jax.device_put(np.arange(16.0), NamedSharding(mesh, PartitionSpec("x")))
    touched = []

    class Watched:
        shape, dtype = value.shape, value.dtype

        @property
        def addressable_shards(self):
            class Shard:
                def __init__(self, shard):
                    self.index = shard.index
                    self._shard = shard

                @property
                def data(self):
                    touched.append(self.index)
                    return self._shard.data

            return [Shard(shard) for shard in value.addressable_shards]

    assert as_view(Watched())[5:8].get().tolist() == [5, 6, 7]
    assert touched == [(slice(4, 6, None),), (slice(6, 8, None),)]

    class Partial(Watched):
        @property
        def addressable_shards(self):
            return value.addressable_shards[:2]

    assert as_view(Partial())[:3].get().tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="other processes"):
        as_view(Partial())[3:6].get()


# NumPy and JAX ask for arrays in their own ways.


def test_numpy_and_jax_take_views_for_arrays():
    view = as_view(ArrayLeaf(np.arange(6, dtype=np.int32).reshape(2, 3)))
    assert np.asarray(view).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert np.asarray(view[1], dtype=np.float32).dtype == np.float32
    assert np.array(view.T, copy=True).shape == (3, 2)
    with pytest.raises(ValueError, match="new array"):
        np.asarray(view, copy=False)
    assert jnp.asarray(np.asarray(view)).sum() == 15
    np.testing.assert_array_equal(np.add(view, 1), view.get() + 1)
    assert jax.tree.leaves({"a": view}) == [view]
    function = ot.LazyThreadPoolArray((2, 3), np.int32, view.get)
    assert np.asarray(function, dtype=np.float32).tolist() == view.get().tolist()


# Reading.


@pytest.mark.parametrize("array", [as_view(np.arange(3.0), "a"), lazy.LazyThreadPoolArray((3,), float, np.ones)])
def test_arithmetic_says_what_to_do_instead(array):
    """With NumPy's arrays it is NumPy's, as before: `np.asarray(array)` is what NumPy then calls."""
    for operation in (
        lambda: array * 2,
        lambda: 2 * array,
        lambda: array + array,
        lambda: -array,
        lambda: abs(array),
        lambda: array / 2.0,
        lambda: array**2,
        lambda: array @ array,
    ):
        with pytest.raises(TypeError, match=r"np\.asarray\(array\) reads it; in a restore, transforms compute"):
            operation()


def test_arithmetic_with_numpy_is_numpys():
    view = as_view(np.arange(3.0), "a")
    np.testing.assert_array_equal(view * np.float64(2) + np.ones(3), [1, 3, 5])
    np.testing.assert_array_equal(np.ones(3) - view, [1, 0, -1])


_LIGHT = """
import sys, threading
started = []
threading.Thread.start = started.append
import orbax_t5x.lazy
heavy = {"jax", "flax", "optax", "tensorstore", "orbax"} & set(sys.modules)
print(sorted(heavy), started)
"""


def test_importing_makes_no_thread_and_imports_no_framework():
    done = subprocess.run([sys.executable, "-c", _LIGHT], capture_output=True, text=True, timeout=800, check=True)
    assert done.stdout == "[] []\n"
