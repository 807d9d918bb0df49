"""No function of a user can stop the machinery: whatever it raises reaches the caller, and the next read works.

All calls of a kind of lazy array run in a process of their own, where a watchdog ends what hangs.
"""

import pytest

from tests.support.jax_job import run_alone

pytestmark = pytest.mark.slow

# A process imports JAX and runs every exception; a hang lasts for ever.
_WATCHDOG_SECS = 700

_PRELUDE = """
import asyncio, faulthandler, sys, tempfile
import numpy as np
import jax
from safetensors.numpy import save_file
import orbax_t5x as ot
from orbax_t5x.lazy import as_view
from orbax_t5x.lazy.several import stack

KINDS = [ValueError, StopIteration, StopAsyncIteration, KeyboardInterrupt, SystemExit, GeneratorExit,
         asyncio.CancelledError]
path = tempfile.mkdtemp() + "/model.safetensors"
save_file({"a": np.arange(6, dtype=np.float32)}, path)

def blocking(kind):
    def get_fn():
        raise kind("by the user")
    return ot.LazyThreadPoolArray((6,), np.float32, get_fn)

def awaited(kind):
    async def get_fn():
        await asyncio.sleep(0)
        raise kind("by the user")
    return ot.LazyAwaitableArray((6,), np.float32, get_fn)

def restored(array):
    def put(state, target):
        return {"a": array}
    return ot.restore(path, {"a": jax.ShapeDtypeStruct((6,), np.float32)}, [put])

def check(kind, call):
    try:
        call()
    except BaseException as error:
        if kind is StopIteration:
            assert type(error) is RuntimeError and isinstance(error.__cause__, StopIteration), repr(error)
        else:
            assert type(error) is kind and str(error) == "by the user", repr(error)
    else:
        raise AssertionError(f"{kind.__name__} was lost")
    with ot.open_checkpoint(path) as checkpoint:
        assert checkpoint.leaves["a"].get().tolist() == [0, 1, 2, 3, 4, 5]
    assert restored(np.ones(6, np.float32))["a"].sum() == 6
"""

MAKERS = ["blocking", "awaited"]
CALLS = (
    "make(kind).get()",
    "np.asarray(make(kind))",
    "as_view(make(kind)).get()",
    "stack([as_view(make(kind)), as_view(np.ones(6, np.float32))]).get()",
    "np.asarray(as_view(make(kind))[2:4])",
    "restored(make(kind))",
)


@pytest.mark.parametrize("maker", MAKERS)
def test_what_a_get_fn_raises_reaches_the_caller_and_the_next_read_works(maker):
    body = f"""
make = {maker}
for call in {CALLS!r}:
    for kind in KINDS:
        faulthandler.dump_traceback_later({_WATCHDOG_SECS}, exit=True)
        check(kind, lambda: eval(call))
"""
    assert_all_reach_the_caller(body)


def test_what_the_progress_of_a_conversion_raises_reaches_the_caller():
    body = f"""
def raised(kind):
    def progress(done, total, leaf):
        raise kind("by the user")
    try:
        ot.convert(path, tempfile.mkdtemp() + "/converted", progress=progress)
    except ot.errors.CheckpointIOError as error:
        raise error.__cause__

for kind in KINDS:
    faulthandler.dump_traceback_later({_WATCHDOG_SECS}, exit=True)
    check(kind, lambda: raised(kind))
    ot.convert(path, tempfile.mkdtemp() + "/converted")
"""
    assert_all_reach_the_caller(body)


def assert_all_reach_the_caller(body):
    body += """
faulthandler.cancel_dump_traceback_later()
print("all reached the caller")
"""
    assert run_alone(_PRELUDE + body).strip() == "all reached the caller"
