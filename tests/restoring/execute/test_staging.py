"""Arrays on their way to devices pass through few buffers, which no other reads touch before they have arrived.

CPU devices stand in for those with memory of their own: arrays are made of copies, and what a transfer still reads is
compared with what it was given.
"""

import threading

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import orbax_t5x as ot
from orbax_t5x.restoring.execute import buffers, groups
from tests.support.placed_arrays import sharded

SHAPE = (256, 1000)
NBYTES = 256 * 1000 * 4
RANDOM = np.random.default_rng(0)
ARRAYS = {f"l{number}": RANDOM.normal(size=SHAPE).astype(np.float32) for number in range(12)}
MIB = 1 << 20


class Device:
    """Transfers from buffers of the host: what is under way, and the memory that was taken for it."""

    def __init__(self):
        self.under_way = {}
        self.taken = []
        self.arrived = []
        self.is_busy = threading.Event()

    def make(self, shape, sharding, buffer_of):
        given = []

        def copied(index):
            given.append(buffer_of(index))
            return np.array(given[-1])

        array = self._make(shape, sharding, copied)
        self.under_way[id(array)] = [(buffer, buffer.copy()) for buffer in given]
        return array

    def put(self, values):
        arrays = self._put([np.array(value) for value in values])
        for array, value in zip(arrays, values, strict=True):
            self.under_way[id(array)] = [(value, value.copy())]
        return arrays

    def wait(self, arrays):
        assert self.is_busy.wait(60)  # a transfer takes longer than a read
        for array in arrays:
            for buffer, value in self.under_way.pop(id(array), ()):
                np.testing.assert_array_equal(buffer, value)  # not read over before it arrived
                self.arrived.append(buffer.__array_interface__["data"][0])
        return self._wait(arrays)

    def empty(self, shape, dtype):
        memory = self._empty(shape, dtype)
        self.taken.append(memory)
        if len(self.taken) == 2:
            self.is_busy.set()
        return memory


@pytest.fixture
def device(monkeypatch):
    fake = Device()
    fake._make, fake._put, fake._wait = jax.make_array_from_callback, jax.device_put, jax.block_until_ready
    fake._empty = buffers.empty_array
    monkeypatch.setattr(buffers, "_HOST_PLATFORMS", frozenset())
    monkeypatch.setattr(groups, "_GROUP_BYTES", MIB)  # each array a group of its own
    monkeypatch.setattr(jax, "make_array_from_callback", fake.make)
    monkeypatch.setattr(jax, "device_put", fake.put)
    monkeypatch.setattr(jax, "block_until_ready", fake.wait)
    monkeypatch.setattr(buffers, "empty_array", fake.empty)
    return fake


def assert_restored(restored, names=ARRAYS):
    for name in names:
        np.testing.assert_array_equal(np.asarray(restored[name]), ARRAYS[name])


@pytest.fixture
def path(tmp_path):
    save_file(ARRAYS, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), None])
def test_two_buffers_take_turns_where_the_limit_holds_two(path, device, spec):
    leaf = jax.ShapeDtypeStruct(SHAPE, np.float32) if spec is None else sharded(SHAPE, spec=spec)
    restored = ot.restore(path, dict.fromkeys(ARRAYS, leaf), memory_limit_bytes=2 * MIB)
    assert_restored(restored)
    assert not device.under_way
    assert [memory.size for memory in device.taken] == [MIB, MIB]
    starts = [memory.__array_interface__["data"][0] for memory in device.taken]
    used = [next(at for at, start in enumerate(starts) if start <= one < start + MIB) for one in device.arrived]
    assert set(used) == {0, 1}


def test_what_stays_on_the_host_has_memory_of_its_own(path, device):
    target = {name: np.zeros(SHAPE, np.float32) if number % 2 else sharded(SHAPE) for number, name in enumerate(ARRAYS)}
    restored = ot.restore(path, target, memory_limit_bytes=2 * MIB)
    assert_restored(restored)
    staged = {memory.__array_interface__["data"][0] for memory in device.taken if memory.size % MIB == 0}
    owned = [restored[name].base.__array_interface__["data"][0] for name in list(ARRAYS)[1::2]]
    assert len(set(owned)) == len(owned) == 6 and not staged & set(owned)


def test_the_callers_settings_decide_what_is_sent(path, device, monkeypatch):
    """In a worker thread the default device is another one; an array on the host would keep a buffer of transfers."""
    main, platforms = threading.current_thread(), buffers._platforms

    def of_thread(leaf):
        is_here = leaf.sharding is None and threading.current_thread() is main
        return {"host"} if is_here else platforms(leaf)

    monkeypatch.setattr(buffers, "_platforms", of_thread)
    monkeypatch.setattr(buffers, "_HOST_PLATFORMS", frozenset({"host"}))
    leaf = jax.ShapeDtypeStruct(SHAPE, np.float32)
    target = {name: leaf if number % 2 else sharded(SHAPE) for number, name in enumerate(ARRAYS)}
    given = []
    monkeypatch.setattr(jax, "device_put", lambda values: given.extend(values) or device.put(values))
    assert_restored(ot.restore(path, target, memory_limit_bytes=2 * MIB))
    staged = [memory for memory in device.taken if memory.size % MIB == 0]
    assert len(given) == 6 and not any(np.shares_memory(one, memory) for one in given for memory in staged)


def test_kept_buffers_make_room_for_others_of_another_size():
    staging = buffers.StagingBuffers(4 * MIB, ())
    small = [staging.take(MIB) for _ in range(3)]
    for one in small:
        staging.give(one)
    assert staging.take(MIB - 5) is small[2]
    large = staging.take(2 * MIB - 7)
    assert large.size == 2 * MIB
    assert staging.take(MIB) is small[1]
    # The oldest made room: three are in use, of the size of the limit.
    assert staging.take(MIB) is not small[0]
