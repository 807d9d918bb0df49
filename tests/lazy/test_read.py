"""Reading views: with loops, threads, forks and failures about."""

import asyncio
import subprocess
import sys
import threading

import numpy as np
import pytest

from orbax_t5x import lazy
from orbax_t5x.errors import CorruptCheckpointError
from orbax_t5x.lazy import as_view, full_box, several
from orbax_t5x.testing.array_leaf import ArrayLeaf


class Failing(ArrayLeaf):
    async def read_into(self, requests, stats):
        raise CorruptCheckpointError("checksum does not hold", path=self.path, leaf=self.name)


class Waiting(ArrayLeaf):
    cancelled = False

    async def read_into(self, requests, stats):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise


def test_a_failure_is_raised_as_it_is_and_ends_the_other_reads():
    waiting = Waiting(np.zeros(3), "b")
    both = several.stack([as_view(Failing(np.zeros(3), "a")), as_view(waiting)])
    with pytest.raises(CorruptCheckpointError, match="leaf 'a'"):
        both.get()
    assert waiting.cancelled
    # The thread still serves.
    assert as_view(1).get() == 1


def test_several_views_are_read_in_one_go_and_each_leaf_once():
    leaves = [ArrayLeaf(np.arange(12.0).reshape(3, 4), f"leaf{i}") for i in range(3)]
    views = [as_view(leaf) for leaf in leaves]
    outs = [np.empty((3, 4)), np.empty((4, 3)), np.empty((2, 2))]
    stats = lazy.read_views(
        [
            (views[0], full_box((3, 4)), outs[0]),
            (views[0].T, full_box((4, 3)), outs[1]),
            (several.concatenate(views), ((2, 4), (1, 3)), outs[2]),
        ]
    )
    np.testing.assert_array_equal(outs[0], leaves[0].array)
    np.testing.assert_array_equal(outs[1], leaves[0].array.T)
    np.testing.assert_array_equal(outs[2], np.concatenate([leaf.array for leaf in leaves])[2:4, 1:3])
    assert [len(leaf.calls) for leaf in leaves] == [1, 1, 0] and [leaf.verified for leaf in leaves] == [1, 1, 0]
    # What several boxes of a leaf share counts once: all of leaf0, and two elements of leaf1.
    assert stats.bytes_read == (12 + 2) * 8 and stats.verify == "touched"


def test_an_empty_box_reads_nothing():
    leaf = ArrayLeaf(np.zeros((3, 4)))
    assert as_view(leaf)[1:1].get().shape == (0, 4)
    assert as_view(leaf).requests(((1, 1), (0, 4))) == [] and as_view(leaf).scratch_bytes(((1, 1), (0, 4))) == 0
    assert leaf.calls == [] and leaf.verified == 0


def test_reading_works_where_a_loop_is_running_and_from_many_threads():
    leaf = ArrayLeaf(np.arange(1000.0).reshape(10, 100))
    view = several.stack([as_view(leaf)] * 3, 1)[:, 1].T

    async def main():
        blocking = view.get()
        awaited = await asyncio.gather(*(view[i].get_async() for i in range(5)))
        return blocking, awaited

    blocking, awaited = asyncio.run(main())
    np.testing.assert_array_equal(blocking, leaf.array.T)
    for i, row in enumerate(awaited):
        np.testing.assert_array_equal(row, leaf.array.T[i])

    wrong = []

    def work(seed):
        rng = np.random.default_rng(seed)
        for _ in range(20):
            i = int(rng.integers(100))
            if view[i].get().tolist() != leaf.array.T[i].tolist():
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


_FORK = """
import os, sys, threading
import numpy as np
from orbax_t5x.lazy import LazyThreadPoolArray, as_view
array = LazyThreadPoolArray((), "float32", lambda: np.float32(2))
view = as_view(array)
import asyncio
assert view.get() == 2 and asyncio.run(array.get_async()) == 2
child = os.fork()
if child == 0:
    ok = view.get() == 2 and asyncio.run(array.get_async()) == 2
    os._exit(0 if ok else 1)
_, status = os.waitpid(child, 0)
assert view.get() == 2
print("child", os.waitstatus_to_exitcode(status))
"""


def test_reading_goes_on_in_a_forked_child():
    # In a process of its own, without JAX: forking one with JAX in it is not what is tested here.
    done = subprocess.run([sys.executable, "-c", _FORK], capture_output=True, text=True, timeout=800, check=False)
    assert done.stdout == "child 0\n", done.stderr
