"""The processes of one JAX job: real ones, because a missing peer ends a process."""

import atexit
import contextlib
import faulthandler
import itertools
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from tests.support.xla import xla_flags

REPOSITORY = Path(__file__).parents[2]
# Guards against hangs only: a loaded machine takes minutes to start four processes.
_TIMEOUT_SECS = 800
# Processes that run tests at once begin far from each other.
_PORTS = itertools.count(os.getpid() * 97)
_TOLD = "told "
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["jax", "jax.experimental.multihost_utils", "flax.nnx", "optax", "orbax.checkpoint.v1", "orbax_t5x"]
)
_BEGIN = f"""
import json, sys, warnings
import jax, numpy as np
process, count, coordinator = int(sys.argv.pop(1)), int(sys.argv.pop(1)), sys.argv.pop(1)

def tell(value):
    print(f"{_TOLD}{{json.dumps(value)}}", flush=True)

"""
_JOIN = """
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(coordinator, count, process, initialization_timeout=800, **{times})
"""


def run_processes(
    work_of: Callable[[int, str], tuple[str, Sequence[object]]],
    count: int,
    *,
    killed: Collection[int] = (),
    aborted: Collection[int] = (),
    environment: Mapping[str, str] | None = None,
) -> list[str]:
    """Runs Python code in several processes, and returns what they print.

    They are forked from a process that has imported JAX and Orbax and done nothing else: importing both takes longer
    than what most of them do.

    Args:
      work_of: the code of a process and its `sys.argv[1:]`, from its index and the coordinator's address.
      count: of processes.
      killed: those that are killed on the way, by themselves or each other.
      aborted: those that JAX ends.
      environment: variables beside the caller's.
    """
    sys.audit("os.fork")  # is raised in the process that forks these alone; fast tests are skipped by it
    coordinator = f"127.0.0.1:{_free_port()}"
    variables = {**os.environ, "JAX_PLATFORMS": "cpu", **(environment or {})}
    with tempfile.TemporaryDirectory() as folder:
        printed = [(Path(folder) / f"{index}.out", Path(folder) / f"{index}.err") for index in range(count)]
        workers = []
        for index in range(count):
            code, arguments = work_of(index, coordinator)
            given = (code, [str(argument) for argument in arguments], variables, printed[index])
            workers.append(_CONTEXT.Process(target=_run, args=given))
        try:
            for worker in workers:
                worker.start()
            guard = time.monotonic() + _TIMEOUT_SECS
            for worker in workers:
                worker.join(max(0.0, guard - time.monotonic()))
        finally:
            for worker in workers:
                worker.kill()
                worker.join()
        for index, worker in enumerate(workers):
            expected = -signal.SIGKILL if index in killed else -signal.SIGABRT if index in aborted else 0
            assert worker.exitcode == expected, printed[index][1].read_text(errors="replace")[-4000:]
        return [output.read_text() for output, _ in printed]


def _free_port() -> int:
    """Finds a port that no server has, below those that the system gives out.

    One of those could go to a server of another test before the coordinator begins.
    """
    while True:
        port = 10_000 + next(_PORTS) % 20_000
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", port))
            return port


def run_alone(code: str) -> str:
    """Returns what Python code prints in a process that has imported JAX and Orbax and done nothing else."""
    (printed,) = run_processes(lambda index, coordinator: (code, ()), 1)
    return printed


def _run(code: str, arguments: list[str], variables: Mapping[str, str], printed: Sequence[Path]) -> None:
    """Makes this process one that `python -W ignore -c` began."""
    os.chdir(REPOSITORY)
    os.environ.clear()
    os.environ.update(variables)
    for number, path in enumerate(printed, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    faulthandler.enable()  # an end by native code tells where Python was
    warnings.simplefilter("ignore")
    sys.argv = ["-c", *arguments]
    try:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    finally:
        atexit._run_exitfuncs()
        # Python 3.13 forgets in a fork what JAX registered where it was imported.
        jax.distributed.shutdown()


def run_script(
    script: str,
    count: int,
    *arguments: object,
    devices: int = 2,
    before: str = "",
    killed: Collection[int] = (),
    aborted: Collection[int] = (),
    heartbeat_secs: int | None = None,
) -> list[list[Any]]:
    """Runs a script as the processes of one job, and returns what each has told.

    Args:
      script: finds `process` and `count`, its arguments in `sys.argv[1:]`, `tell`, which takes a JSON value, and
        `json`, `sys`, `warnings`, `jax` and `np` imported.
      count: of processes.
      arguments: of the script.
      devices: of each process.
      before: what runs before the processes join.
      killed: the processes that kill themselves.
      aborted: those that JAX ends.
      heartbeat_secs: after which JAX notices a process that died.
    """
    times = {} if heartbeat_secs is None else {"heartbeat_timeout_seconds": heartbeat_secs}
    code = _BEGIN + textwrap.dedent(before) + _JOIN.format(times=times) + textwrap.dedent(script)
    outputs = run_processes(
        lambda index, coordinator: (code, [index, count, coordinator, *arguments]),
        count,
        killed=killed,
        aborted=aborted,
        environment={"XLA_FLAGS": xla_flags(devices)},
    )
    lines = [[line.removeprefix(_TOLD) for line in output.splitlines() if line.startswith(_TOLD)] for output in outputs]
    return [[json.loads(line) for line in mine] for mine in lines]
