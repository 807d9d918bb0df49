"""JAX's thread-local settings of the caller hold for every array that a restore makes: `jax.device_put` in the caller's
thread is the oracle. What a callback raises arrives, and nothing hangs."""

import asyncio
import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_t5x as ot
from tests.support.memory_checkpoint import AwaitedLeaf, BlockedLeaf, checkpoint

S = jax.ShapeDtypeStruct
MESH = Mesh(np.asarray(jax.devices()), ("x",))
WIDE = {
    "int": np.arange(8, dtype=np.int64) + 2**40,
    "float": np.arange(8, dtype=np.float64) + 2.0**-40,
    "complex": np.arange(8) + 1j * 2.0**-40,
}


@pytest.fixture(params=[BlockedLeaf, AwaitedLeaf])
def kind(request):
    return request.param


@pytest.mark.parametrize("sharding", [None, NamedSharding(MESH, P("x"))], ids=["one", "sharded"])
def test_64_bits_survive_under_the_context_manager(kind, sharding):
    source = checkpoint(WIDE, kind)
    with jax.enable_x64(True):
        target = {name: S(array.shape, array.dtype, sharding=sharding) for name, array in WIDE.items()}
        got = ot.restore(source, target)
        for name, array in WIDE.items():
            assert got[name].dtype == jax.device_put(array).dtype == array.dtype
            np.testing.assert_array_equal(np.asarray(got[name]), array)


def test_a_fallback_function_computes_with_64_bits_under_the_context_manager():
    with jax.enable_x64(True):
        target = {"a": S((8,), np.int64)}
        got = ot.restore(
            checkpoint({}), target, fallback_for=[".*"], fallback=lambda: {"a": jnp.arange(8, dtype=jnp.int64) + 2**40}
        )
        np.testing.assert_array_equal(np.asarray(got["a"]), WIDE["int"])


SHARDINGS = {
    "one": None,
    "sharded": NamedSharding(MESH, P("x")),
    "replicated": NamedSharding(MESH, P()),
    "single": jax.sharding.SingleDeviceSharding(jax.devices()[3]),
}


@pytest.mark.parametrize("sharding", SHARDINGS.values(), ids=SHARDINGS)
@pytest.mark.parametrize("guard", ["transfer_guard", "transfer_guard_host_to_device"])
def test_a_guard_against_implicit_transfers_permits_a_restore(kind, guard, sharding):
    array = np.arange(16, dtype=np.float32)
    key = jax.random.key(7)
    source = checkpoint({"a": array, "key": np.asarray(jax.random.key_data(key))}, kind)
    target = {"a": S((16,), np.float32, sharding=sharding), "key": S(key.shape, key.dtype)}
    with getattr(jax, guard)("disallow"):
        got = ot.restore(source, target)
        with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
            jnp.add(jax.device_put(array), array)
    np.testing.assert_array_equal(np.asarray(got["a"]), array)
    assert got["key"] == key
    assert sharding is None or got["a"].sharding == sharding


def test_the_default_device_of_the_caller_is_used(kind):
    device = jax.devices()[3]
    source = checkpoint({"a": np.ones(2, np.float32)}, kind)
    with jax.default_device(device):
        expected = jax.device_put(np.ones(2, np.float32)).devices()
        got = ot.restore(
            source,
            {"a": S((2,), np.float32), "b": S((2,), np.float32), "c": S((2,), np.float32)},
            ot.transforms.Merge({"b": np.ones(2, np.float32)}),
            fallback=lambda: {"c": jnp.zeros(2)},
        )
    assert expected == {device}
    assert [array.devices() for array in got.values()] == [expected] * 3


RAISED = [
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    RuntimeError,
    ZeroDivisionError,
    MemoryError,
    StopIteration,
    StopAsyncIteration,
    KeyboardInterrupt,
    SystemExit,
    GeneratorExit,
    asyncio.CancelledError,
    TimeoutError,
]


@dataclasses.dataclass(frozen=True)
class Raising(ot.transforms.Transform):
    """A transform of a caller's own."""

    function: Callable[[], None]

    def apply(self, state, target, diagnostics):
        return self.function()


@pytest.mark.parametrize("error", RAISED)
@pytest.mark.parametrize("callback", ["progress", "transform", "own transform"])
def test_what_a_callback_raises_arrives_alone_or_behind_the_problem_of_a_transform(kind, error, callback):
    source = checkpoint({"a": np.ones(2, np.float32), "b": np.ones(2, np.float32)}, kind)
    target = {"a": S((2,), np.float32), "b": np.zeros(2, np.float32)}

    def raising(*_):
        raise error("mine")

    # OSError and MemoryError say nothing about the transform, and what is no Exception ends the program.
    is_problem = (
        callback != "progress" and issubclass(error, Exception) and not issubclass(error, OSError | MemoryError)
    )
    with pytest.raises(ot.RestorePlanError if is_problem else error, match="mine") as caught:
        if callback == "progress":
            ot.restore(source, target, progress=raising)
        else:
            ot.restore(source, target, raising if callback == "transform" else Raising(raising))
    if is_problem:
        assert type(caught.value.__cause__) is error
        assert [(problem.kind, problem.leaf) for problem in caught.value.problems] == [("transform", None)]
    got = ot.restore(source, target)
    np.testing.assert_array_equal(np.asarray(got["a"]), np.ones(2))


@pytest.mark.parametrize("error", RAISED)
def test_a_fallback_function_that_raises_is_a_problem_or_arrives(error):
    def raising():
        raise error("mine")

    expected = ot.RestorePlanError if issubclass(error, Exception) else error
    with pytest.raises(expected, match="mine"):
        ot.restore(checkpoint({}), {"a": S((2,), np.float32)}, fallback_for=[".*"], fallback=raising)


def test_progress_is_called_in_the_callers_thread_and_may_restore_itself(kind):
    source = checkpoint({"a": np.ones(2, np.float32)}, kind)
    target = {"a": np.zeros(2, np.float32)}
    calls = []

    def progress(done, total, leaf):
        with jax.enable_x64(True):
            calls.append((done, total, leaf, ot.restore(source, target)["a"].sum()))

    ot.restore(source, target, progress=progress)
    assert calls == [(8, 8, "a", 2)]
