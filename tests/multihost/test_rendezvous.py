"""Barriers of processes that come late to the first call of a job, never come, or are interrupted while they wait."""

import numpy as np
import pytest
import safetensors.numpy

from orbax_t5x.errors import CheckpointIOError
from orbax_t5x.multihost import rendezvous
from tests.support.jax_job import run_script

_BEGIN = """
import logging, os, signal, threading, time
import orbax.checkpoint as ocp
import orbax_t5x as ot
from orbax_t5x.multihost import openings, rendezvous

HANG_MS = 700_000
source, folder = sys.argv[1:]
store = ocp.multihost.get_jax_distributed_client()

def wait_for_first():
    while sum(key.endswith("/arrived/0") for key, _ in store.key_value_dir_get("orbax_t5x/rendezvous/")) < 2:
        time.sleep(0.05)
    time.sleep(0.5)
"""


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"kernel": np.arange(12, dtype=np.float32)}, path)
    return path


# With Gloo the first all-gather gives up on a process that is 30 s late.
_LATE = """
from orbax_t5x.multihost import collectives
exchange_slots = collectives._exchange_slots

def noted(*arguments, **keywords):
    store.key_value_set("test/begun", "", allow_overwrite=True)
    return exchange_slots(*arguments, **keywords)

def late(state, target, *, is_resuming=False):
    if process == 1:
        wait_for_first()
        tell(store.key_value_dir_get("test/"))
    return state

collectives._exchange_slots = noted
jax.devices()
state = ot.restore(source, None, [late], is_resuming=False)
tell(state["kernel"].tolist())
tell([key for key, _ in store.key_value_dir_get("test/")])
"""


def test_a_collective_begins_when_all_processes_have_arrived(source, tmp_path):
    first, second = run_script(_BEGIN + _LATE, 2, source, tmp_path)
    assert second.pop(0) == []
    assert first == second == [list(range(12)), ["test/begun"]]


_INTERRUPTED = """
from orbax_t5x.multihost import collectives
exchange_slots = collectives._exchange_slots

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

def interrupt_when(waits):
    threading.Thread(target=lambda: (waits.wait(), os.kill(os.getpid(), signal.SIGINT)), daemon=True).start()

def verify(name, waits=None):
    if process == 0 and waits is not None:
        interrupt_when(waits)
        try:
            ot.verify(source)
        except KeyboardInterrupt:
            tell("interrupted")
        store.key_value_set(f"test/{name}", "")
    else:
        if waits is not None:
            store.blocking_key_value_get(f"test/{name}", HANG_MS)
        if process == 0 or name == "first":
            tell(ot.verify(source).status)

class Store:
    def __getattr__(self, name):
        if name == "blocking_key_value_get":
            waits.set()
        return getattr(store, name)

def gathers_noted(*arguments, **keywords):
    gathers.set()
    return exchange_slots(*arguments, **keywords)

# Before JAX has made its backend, which waits for the backends of the others.
rendezvous.key_value_store, waits = Store, threading.Event()
verify("first", waits)
if process == 0:
    verify("first")
# And where all have computed together.
collectives._exchange_slots, gathers = gathers_noted, threading.Event()
verify("second", gathers)
jax.distributed.shutdown()  # the coordinator ends last
os._exit(0)
"""


def test_an_interrupt_ends_the_wait_for_others(source, tmp_path):
    first, second = run_script(_BEGIN + _INTERRUPTED, 2, source, tmp_path)
    assert first == ["interrupted", "no checksum", "interrupted"]
    assert second == ["no checksum"]


_FAILS = """
openings._COLLECTIVE_BEGIN_SECS = 1  # process 0 opens something else
try:
    ot.restore(source if process == 0 else f"{folder}/nothing", None)
except ot.errors.CheckpointError as error:
    tell([type(error).__name__, str(error)])
"""


def test_a_process_that_fails_in_planning_is_not_waited_for(source, tmp_path):
    first, second = run_script(_BEGIN + _FAILS, 2, source, tmp_path)
    ((kind, text),) = first
    assert kind == second[0][0] == "CheckpointNotFoundError" and "(on process 1)" in text


# The second process begins when the log of the first has named it.
_STARTS_LATE = """
reports = []

class Reports(logging.Handler):
    def emit(self, record):
        reports.append(record.getMessage())
        store.key_value_set("test/begin", "", allow_overwrite=True)

logging.getLogger("orbax_t5x.multihost.rendezvous").addHandler(Reports())
rendezvous._FIRST_REPORT_SECS = rendezvous._REPORT_SECS = rendezvous._POLL_SECS = 0.1
if sys.argv[-1] == "backend":
    jax.devices()
if process == 1:
    store.blocking_key_value_get("test/begin", HANG_MS)
tell(ot.restore(source, None, broadcast=True)["kernel"].tolist())
tell(reports[0] if process == 0 else None)
"""


@pytest.mark.parametrize("begun", ["backend", "nothing"])
def test_a_process_that_starts_late_is_waited_for_and_named_in_the_log(source, tmp_path, begun):
    begin = _BEGIN.replace("source, folder =", "source, folder, _ =")
    first, second = run_script(begin + _STARTS_LATE, 2, source, tmp_path, begun)
    assert first[0] == second[0] == list(range(12))
    assert first[1].endswith("for process 1 to arrive")


def test_a_service_that_is_gone_is_a_typed_error(monkeypatch):
    """Also where a process only says that it has arrived, as JAX has a backend."""

    class Gone:
        def __getattr__(self, name):
            raise RuntimeError("UNAVAILABLE: Connection reset by peer")

    monkeypatch.setattr(rendezvous, "key_value_store", Gone)
    barrier = rendezvous._Barrier("backend", 0, range(2), "path")
    for call in (barrier.arrive, barrier.wait):
        with pytest.raises(CheckpointIOError, match=r"path: another process of this call has died, .*UNAVAILABLE"):
            call()
