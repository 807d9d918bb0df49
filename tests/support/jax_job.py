"""The processes of one JAX job: real ones, because a missing peer ends a process."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
# Guards against hangs only: a loaded machine takes minutes to start four processes.
_TIMEOUT_SECS = 800
_TOLD = "told "
_BEGIN = f"""
import json, sys, warnings
import jax, numpy as np
process, count, coordinator = int(sys.argv.pop(1)), int(sys.argv.pop(1)), sys.argv.pop(1)

def tell(value):
    print(f"{_TOLD}{{json.dumps(value)}}", flush=True)

"""
_JOIN = """
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(coordinator, count, process, initialization_timeout=800)
"""


def run_processes(
    command_of: Callable[[int, str], Sequence[str]],
    count: int,
    *,
    killed: Collection[int] = (),
    stopped: Collection[int] = (),
    environment: Mapping[str, str] | None = None,
) -> list[str]:
    """Runs one command for each process, and returns what they print.

    Args:
      command_of: the command of a process, from its index and the coordinator's address.
      count: of processes.
      killed: those that are killed on the way, by themselves or each other.
      stopped: those that stop, and are killed when the others have ended.
      environment: variables beside the caller's.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    workers = [
        subprocess.Popen(
            command_of(index, coordinator),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env={**os.environ, "JAX_PLATFORMS": "cpu", **(environment or {})},
        )
        for index in range(count)
    ]
    outputs = [("", "")] * count
    try:
        for index in sorted(range(count), key=lambda index: index in stopped):
            if index in stopped:
                workers[index].kill()
            outputs[index] = workers[index].communicate(timeout=_TIMEOUT_SECS)
    finally:
        for worker in workers:
            worker.kill()
    for index, (worker, (_, errors)) in enumerate(zip(workers, outputs, strict=True)):
        assert worker.returncode == (-signal.SIGKILL if index in {*killed, *stopped} else 0), errors[-4000:]
    return [output for output, _ in outputs]


def run_script(
    script: str, count: int, *arguments: object, devices: int = 2, before: str = "", killed: Collection[int] = ()
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
    """
    code = _BEGIN + textwrap.dedent(before) + _JOIN + textwrap.dedent(script)
    outputs = run_processes(
        lambda index, coordinator: [
            *(sys.executable, "-W", "ignore", "-c", code, str(index), str(count), coordinator),
            *map(str, arguments),
        ],
        count,
        killed=killed,
        environment={"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"},
    )
    lines = [[line.removeprefix(_TOLD) for line in output.splitlines() if line.startswith(_TOLD)] for output in outputs]
    return [[json.loads(line) for line in mine] for mine in lines]


def run_job(count, job, *arguments, killed=(), stopped=()) -> list[Any]:
    """What each process of a job of `tests.multihost.jobs.multiprocess_worker` tells.

    None for those that are killed, or that stop: these are killed when the others have ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = [Path(folder) / f"{index}.json" for index in range(count)]

        def command_of(index, coordinator):
            worker = [sys.executable, "-m", "tests.multihost.jobs.multiprocess_worker", job, coordinator]
            return [*worker, str(count), str(index), str(results[index]), *map(str, arguments)]

        run_processes(command_of, count, killed=killed, stopped=stopped)
        return [
            None if index in {*killed, *stopped} else json.loads(result.read_text())
            for index, result in enumerate(results)
        ]
