"""Stages of an execution: any budget, progress, failures."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import orbax_t5x as ot
from orbax_t5x.errors import CorruptCheckpointError
from tests.support.memory_checkpoint import AwaitedLeaf, BlockedLeaf, FailingLeaf, checkpoint
from tests.support.placed_arrays import values


def test_a_read_that_fails_is_the_error_that_comes_out():
    error = CorruptCheckpointError("crc", path="/memory", leaf="bad")
    leaf = FailingLeaf("bad", values((4,)), error)
    source = checkpoint({"bad": leaf, **{f"good{index}": values((4,)) for index in range(50)}}, AwaitedLeaf)
    target = {name: np.zeros(4, np.float32) for name in source.made}
    with pytest.raises(CorruptCheckpointError) as caught:
        ot.restore(source, target)
    assert caught.value is error
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("orbax_t5x-restore")]
    np.testing.assert_array_equal(
        ot.restore(source, {"good7": np.zeros(4, np.float32)}, strict=False)["good7"], values((4,))
    )


@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=30),
    limit=st.integers(1, 2000),
    kind=st.sampled_from([BlockedLeaf, AwaitedLeaf]),
)
def test_any_budget_gives_the_same_values(sizes, limit, kind):
    arrays = {f"a{index}": values((size,), seed=index) for index, size in enumerate(sizes)}
    got = ot.restore(checkpoint(arrays, kind), None, memory_limit_bytes=limit)
    for name, array in arrays.items():
        np.testing.assert_array_equal(got[name], array)


def test_progress_counts_to_the_total_from_one_thread_at_a_time(kind):
    arrays = {f"a{index}": values((100,), seed=index) for index in range(40)}
    calls, busy = [], threading.Lock()

    def progress(done, total, leaf):
        assert busy.acquire(blocking=False)
        calls.append((done, total, leaf))
        busy.release()

    ot.restore(checkpoint(arrays, kind), None, progress=progress)
    assert [done for done, _, _ in calls] == sorted(done for done, _, _ in calls)
    assert calls[-1][:2] == (16000, 16000) and {leaf for _, _, leaf in calls} == set(arrays)


def test_a_progress_that_raises_stops_the_restore():
    def progress(done, total, leaf):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ot.restore(checkpoint({"a": values((4,))}), None, progress=progress)
