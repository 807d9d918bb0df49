"""Work beside the caller's thread: event loops, pools and waits.

Three rules hold for all of it. No function of a user can stop the machinery: what it raises is carried to the caller as
a value, because an event loop ends on KeyboardInterrupt and SystemExit, takes CancelledError for its own, and cannot
store StopIteration. No wait is one long wait: a caller wakes several times a second, notices signals, and notices when
the thread that it waits for has ended. And threads do not survive a fork: a child forgets them all and makes new ones
on first use. No thread is made at import.

The workers of a restore are made elsewhere (`restoring.executor`): they are as many as its plan can use, and end with
it.
"""

from orbax_t5x.concurrency.carried import (
    CarriedError,
    as_carried,
    call_carried,
    call_of_user,
    carry,
    first_failure,
    run_in_pool,
)
from orbax_t5x.concurrency.guard import guarded, is_meant_for_caller
from orbax_t5x.concurrency.loops import LoopThread
from orbax_t5x.concurrency.process_threads import (
    OnceEach,
    balanced_shares,
    function_pool,
    reader_pool,
    run_jobs,
    run_on_read_thread,
    waiting_pool,
)
from orbax_t5x.concurrency.waiting import Block, Budget, await_to_end, for_each_block, wait_all

__all__ = [
    "Block",
    "Budget",
    "CarriedError",
    "LoopThread",
    "OnceEach",
    "as_carried",
    "await_to_end",
    "balanced_shares",
    "call_carried",
    "call_of_user",
    "carry",
    "first_failure",
    "for_each_block",
    "function_pool",
    "guarded",
    "is_meant_for_caller",
    "reader_pool",
    "run_in_pool",
    "run_jobs",
    "run_on_read_thread",
    "wait_all",
    "waiting_pool",
]
