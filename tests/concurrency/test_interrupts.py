"""An exception of a signal handler at every point: the call ends, nothing is left, and the next call works."""

import threading

import numpy as np
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.concurrency import LoopThread, process_threads, run_jobs
from tests.support.interrupts import interrupted_at_random, interrupted_everywhere
from tests.support.memory_checkpoint import AwaitedLeaf, BlockedLeaf, checkpoint

pytestmark = [
    pytest.mark.timeout(300),
    # The interrupt came between the call that made it and the one that takes it.
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited"),
]

ROOM = [f"orbax_t5x/concurrency/{name}.py" for name in ("carried", "loops", "process_threads", "sharing", "waiting")]
EXECUTOR = ["orbax_t5x/restoring/executor.py", "orbax_t5x/lazy/read.py"]
CONVERSION = [f"orbax_t5x/operations/convert/{name}.py" for name in ("work_directory", "job")]
ARRAYS = {"a": np.arange(6, dtype=np.float32), "b": np.ones((2, 3), np.int32)}


@pytest.fixture
def path(tmp_path):
    safetensors.numpy.save_file(ARRAYS, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def restored(source):
    got = ot.restore(source, None)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(got[name], array)


@pytest.mark.slow
def test_a_restore_from_a_file(path):
    restored(path)  # what is made once
    assert interrupted_everywhere(lambda: restored(path), ROOM + EXECUTOR) > 100
    restored(path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [BlockedLeaf, AwaitedLeaf])
def test_a_restore_from_memory(kind):
    source = checkpoint(ARRAYS, kind)
    restored(source)
    assert interrupted_everywhere(lambda: restored(source), ROOM + EXECUTOR) > 100
    restored(source)


def test_one_leaf_of_an_open_checkpoint(path):
    with ot.open_checkpoint(path) as opened:

        def read():
            np.testing.assert_array_equal(opened.leaves["a"].get(), ARRAYS["a"])

        read()
        assert interrupted_everywhere(read, ROOM + EXECUTOR) > 10
        read()


def test_jobs_have_all_ended_when_the_interrupt_is_raised():
    running = []

    def job(number):
        running.append(number)
        running.remove(number)
        return number

    def run():
        try:
            assert sorted(run_jobs(lambda number=number: job(number) for number in range(4))) == [0, 1, 2, 3]
        finally:
            assert not running

    run()
    assert interrupted_everywhere(run, ROOM) > 20
    run()


@pytest.mark.slow
def test_a_conversion_leaves_no_lock_and_no_directory(path, tmp_path):
    destination = tmp_path / "converted" / "model"

    def convert():
        ot.convert(path, destination, format="safetensors", overwrite=True)

    assert interrupted_everywhere(convert, CONVERSION) > 30
    convert()
    restored(destination)
    assert [entry.name for entry in destination.parent.iterdir()] == ["model"]


@pytest.mark.slow
# One in `__del__` is lost: Python prints it, and the call goes on.
@pytest.mark.filterwarnings(r"ignore:[\s\S]*KeyboardInterrupt:pytest.PytestUnraisableExceptionWarning")
def test_signals_at_random_moments_beside_a_busy_thread(path):
    restored(path)
    is_over = threading.Event()

    def compute():
        while not is_over.is_set():
            sum(range(1000))

    busy = threading.Thread(target=compute)
    busy.start()
    try:
        assert interrupted_at_random(lambda: restored(path), 30, seed=1, longest=0.1)
    finally:
        is_over.set()
        busy.join()
    restored(path)


def test_a_thread_that_was_never_closed_ends():
    thread = LoopThread()
    ended = thread._serving.ended
    del thread
    assert ended.wait(60)
    assert process_threads._process_threads.read_thread().is_alive()
