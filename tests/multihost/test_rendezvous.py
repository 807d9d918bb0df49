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
from orbax_t5x.multihost import heartbeat, openings, rendezvous

heartbeat._BEAT_SECS = 0.05
HANG_MS = 700_000
source, folder = sys.argv[1:]
store = ocp.multihost.get_jax_distributed_client()

def wait_for_heartbeats_of_first():
    seen = set()
    while len(seen) < 5:
        seen |= {text for key, text in store.key_value_dir_get("orbax_t5x/beat/") if key.endswith("/0")}
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
        wait_for_heartbeats_of_first()
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


# JAX's own end waits for the other process, which is not tested here.
_ENDS = """
import atexit
if how == "ends":
    atexit.register(os._exit, 0)

def shorten_silence():
    while dict(store.key_value_dir_get("orbax_t5x/beat/")).get("orbax_t5x/beat/1") != "ended":
        time.sleep(0.05)
    heartbeat._SILENT_SECS = 0.2

openings._COLLECTIVE_BEGIN_SECS = 1  # process 0 opens something else
if process == 0:
    threading.Thread(target=shorten_silence, daemon=True).start()

def leave(state, target, *, is_resuming=False):
    if process == 1:
        raise SystemExit
    return state

is_failing = how == "fails" and process == 1
try:
    ot.restore(f"{folder}/nothing" if is_failing else source, None, [] if how == "fails" else [leave])
except ot.errors.CheckpointError as error:
    tell([type(error).__name__, str(error)])
"""


@pytest.mark.parametrize("how", ["fails", "ends"])
def test_a_process_that_fails_in_planning_or_ends_is_not_waited_for(source, tmp_path, how):
    begin = _BEGIN.replace("source, folder =", "source, folder, how =")
    first, second = run_script(begin + _ENDS, 2, source, tmp_path, how)
    ((kind, text),) = first
    if how == "fails":
        assert kind == second[0][0] == "CheckpointNotFoundError" and "(on process 1)" in text
    else:
        assert (kind, second) == ("CheckpointIOError", []) and "process 1 has ended" in text


# Killed where the others cannot know of it: before the first call, with a backend or without.
_KILLED = """
if process == 0:
    os.environ["ORBAX_T5X_FIRST_HEARTBEAT_TIMEOUT_SECS"] = "3"
if sys.argv[-1] == "backend":
    jax.devices()
if process == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    ot.restore(source, None)
except ot.errors.CheckpointError as error:
    tell([type(error).__name__, str(error)])
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.parametrize("begun", ["backend", "nothing"])
def test_a_process_that_dies_before_its_first_heartbeat_is_named(source, tmp_path, begun):
    begin = _BEGIN.replace("source, folder =", "source, folder, _ =")
    first, _ = run_script(begin + _KILLED, 2, source, tmp_path, begun, killed=[1])
    kind, text = first[0]
    assert kind == "CheckpointIOError"
    assert "no first heartbeat has come from process 1 within 3 s" in text
    assert "ORBAX_T5X_FIRST_HEARTBEAT_TIMEOUT_SECS" in text


# The second process begins when the first has waited for it three times as long as for one that falls silent.
_STARTS_LATE = """
reports, begin = [], time.monotonic()

class Reports(logging.Handler):
    def emit(self, record):
        reports.append(record.getMessage())
        if time.monotonic() - begin > 3 * heartbeat._SILENT_SECS:
            late.set()

logging.getLogger("orbax_t5x.multihost.rendezvous").addHandler(Reports())
if sys.argv[-1] == "backend":
    jax.devices()
if process == 0:
    late, silent_secs = threading.Event(), heartbeat._SILENT_SECS
    rendezvous._REPORT_SECS, heartbeat._SILENT_SECS = 0.1, 1.0

    def let_second_begin():
        late.wait()
        heartbeat._SILENT_SECS = silent_secs
        store.key_value_set("test/begin", "")

    threading.Thread(target=let_second_begin, daemon=True).start()
else:
    store.blocking_key_value_get("test/begin", HANG_MS)
tell(ot.restore(source, None, broadcast=True)["kernel"].tolist())
tell(reports[0] if reports else None)
"""


@pytest.mark.parametrize("begun", ["backend", "nothing"])
def test_a_process_that_starts_late_is_waited_for_and_named_in_the_log(source, tmp_path, begun):
    begin = _BEGIN.replace("source, folder =", "source, folder, _ =")
    first, second = run_script(begin + _STARTS_LATE, 2, source, tmp_path, begun)
    assert first[0] == second[0] == list(range(12))
    assert "for the first heartbeat of process 1;" in first[1]
    assert second[1] is None


@pytest.mark.parametrize("text", ["", "soon", "0", "-1", "nan"])
def test_a_wrong_time_limit_is_named(monkeypatch, text):
    monkeypatch.setenv("ORBAX_T5X_FIRST_HEARTBEAT_TIMEOUT_SECS", text)
    with pytest.raises(ValueError, match=f"ORBAX_T5X_FIRST_HEARTBEAT_TIMEOUT_SECS is a positive .*, not '{text}'"):
        rendezvous._first_heartbeat_timeout_secs()


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
