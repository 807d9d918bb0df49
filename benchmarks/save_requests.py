"""Requests of saves beside those of plain Orbax: `python -m benchmarks.save_requests [--processes N …] [--leaves N …]`.

The processes of a job save one state three times by each way, into a bucket of a server that speaks Google's protocol
(Orbax writes arrays to no other), and, where `strace` is installed, into a local directory. The third save is counted:
requests by kind, and system calls that name a file. What the processes send each other through the key-value store of
`jax.distributed` for checksums is counted by themselves.

The number of requests to TensorStore's databases of single processes varies from save to save, with the time at which
their writes end; so does the number of times that Orbax looks for the files of `array_metadatas`. "Beyond plain" leaves
both out.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from tests.support.google_store import GoogleStore
from tests.support.jax_job import run_script

WAYS = ("v0 plain", "v0 ours", "v1 plain", "v1 ours")
SAVES = 3
_MARK = "mark/"
_VARYING = re.compile(r"/(ocdbt\.process_\d+|array_metadatas|d)(/|$)")
_CALLS = {
    "mkdir": "mkdir",
    "rename": "rename",
    "unlink": "remove",
    "rmdir": "remove",
    "fsync": "sync",
    "fdatasync": "sync",
}
_SYSTEM_CALL = re.compile(r"^(?:\d+ +)?(\w+)\((.*)")

SCRIPT = """
    import contextlib, http.client, os, urllib.parse
    import orbax.checkpoint as ocp
    import orbax.checkpoint.experimental.v1 as v1
    import orbax_t5x as ot
    import pytest
    from jax.experimental import multihost_utils
    from orbax_t5x.restoring import processes
    from tests.support import object_paths

    root, leaves, saves = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    whole = np.random.default_rng(0).normal(size=(1 << 10, 4)).astype(np.float32)
    state = {f"w{i}": jax.make_array_from_callback(whole.shape, split, lambda at: whole[at]) for i in range(leaves)}

    class CountedStore:
        def __init__(self, store):
            self.store = store

        def __getattr__(self, name):
            def counted(key, *given, **options):
                result = getattr(self.store, name)(key, *given, **options)
                sent = len(given[0]) if "set" in name else 0
                received = len(result) if isinstance(result, (bytes, str)) else 0
                messages.append([name, sent, received])
                return result
            return counted

    messages = []
    store = processes._store
    processes._store = lambda: CountedStore(store())

    def mark(name):
        multihost_utils.sync_global_devices("begin")
        if process == 0:
            if root.startswith("gs://"):
                server = urllib.parse.urlsplit(os.environ["TENSORSTORE_GCS_HTTP_URL"])
                asked = http.client.HTTPConnection(server.hostname, server.port)
                asked.request("GET", "/storage/v1/b/bucket/o/" + urllib.parse.quote(f"mark/{name}", safe=""))
                asked.getresponse().read()
            else:
                os.path.exists(f"{root}/mark/{name}")
        multihost_utils.sync_global_devices("begun")
        messages.clear()

    def save_v0(root, handler, args):
        with ocp.CheckpointManager(root, item_handlers={"state": handler}) as manager:
            yield
            while True:
                manager.save(step, args=ocp.args.Composite(state=args(state)))
                manager.wait_until_finished()
                yield

    def save_v1(root, context):
        with context, v1.training.Checkpointer(root) as checkpointer:
            yield
            while True:
                checkpointer.save(step, state)
                yield

    if root.startswith("gs://"):
        object_paths.install(pytest.MonkeyPatch())
    ways = {
        "v0 plain": lambda root: save_v0(root, ocp.PyTreeCheckpointHandler(), ocp.args.PyTreeSave),
        "v0 ours": lambda root: save_v0(root, ot.TrainStateHandler(), ot.args.TrainStateSave),
        "v1 plain": lambda root: save_v1(root, v1.Context()),
        "v1 ours": lambda root: save_v1(root, ot.v1.context()),
    }
    for way, saving in ways.items():
        one = saving(f"{root}/{way}")
        next(one)
        for step in range(1, saves + 1):
            mark(f"{way}/{step}")
            next(one)
            multihost_utils.sync_global_devices("saved")
            tell([way, step, messages])
        mark("end")
        one.close()
    mark("end")
"""


class Operation(NamedTuple):
    """One request, or system call: its kind, the path within the item's root, and the bytes of the object."""

    kind: str
    path: str
    nbytes: int


class Counts(NamedTuple):
    """Counts of one job.

    Attributes:
      saves: operations by way and step.
      messages: those of each process to the key-value store (name, bytes sent, bytes received), by way and step.
    """

    saves: dict[tuple[str, int], list[Operation]]
    messages: dict[tuple[str, int], list[list[tuple[str, int, int]]]]

    def kinds(self, way: str, step: int = SAVES) -> dict[str, int]:
        """Counts the operations of a save by kind."""
        return dict(sorted(collections.Counter(one.kind for one in self.saves[way, step]).items()))

    def beyond_plain(self, version: str, step: int = SAVES) -> tuple[dict[tuple[str, str], int], ...]:
        """Returns what a save of ours does more often than Orbax's own, and what less often, by kind and path."""
        plain, ours = (
            collections.Counter(
                (one.kind, one.path) for one in self.saves[f"{version} {way}", step] if not _VARYING.search(one.path)
            )
            for way in ("plain", "ours")
        )
        return dict(ours - plain), dict(plain - ours)


def count_bucket(processes: int, leaves: int) -> Counts:
    """Counts the saves of a job into a bucket."""
    store = GoogleStore()
    variables = store.environment
    try:
        with mock.patch.dict(os.environ, variables):
            told = run_script(SCRIPT, processes, "gs://bucket", leaves, SAVES, devices=1)
    finally:
        store.close()
    return _counts(store.operations, told)


def count_local(processes: int, leaves: int) -> Counts:
    """Counts the system calls of saves of a job into a local directory, by `strace`."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "calls"
        command = [
            "strace",
            "-f",
            "-y",
            "-qq",
            "-s",
            "4096",
            "-e",
            "trace=%file,fsync,fdatasync",
            "-e",
            "signal=none",
            "-o",
            str(log),
        ]
        worker = [sys.executable, "-m", "benchmarks.save_requests", "--local-job", folder]
        subprocess.run([*command, *worker, "--processes", str(processes), "--leaves", str(leaves)], check=True)
        return _counts(_system_calls(log.read_text(errors="replace").splitlines(), f"{folder}/root/"), [])


def _system_calls(lines: Iterable[str], root: str) -> Iterator[tuple[str, str, int]]:
    """Yields kind, path below a root and 0 of each call that names one; of several processes, in order of time."""
    for line in lines:
        found = _SYSTEM_CALL.match(line)
        if found is None or root not in found[2]:
            continue
        name, given = found.groups()
        path = re.split(r'["<>]', given.partition(root)[2], maxsplit=1)[0]
        kind = next((kind for call, kind in _CALLS.items() if name.startswith(call)), None)
        if kind is None and name.startswith("open"):
            kind = "list" if "O_DIRECTORY" in given else "create" if "O_CREAT" in given else "open"
        yield kind or "stat", path, 0


def _counts(operations: Iterable[tuple[str, str, int]], told: Iterable[list[Any]]) -> Counts:
    saves: dict[tuple[str, int], list[Operation]] = {}
    current: list[Operation] = []
    for kind, key, nbytes in operations:
        if key.startswith(_MARK):
            way, _, step = key.removeprefix(_MARK).partition("/")
            current = saves.setdefault((way, int(step)), []) if step else []
        else:
            path = re.sub(r"^v[01] (plain|ours)(/\d+|)", lambda at: "STEP" if at[2] else "ROOT", key)
            path = re.sub(r"\.orbax-checkpoint-tmp[^/]*", "", path)
            current.append(Operation(kind, path, nbytes))
    messages: dict[tuple[str, int], list[list[tuple[str, int, int]]]] = {}
    for way, step, sent in itertools.chain.from_iterable(told):
        messages.setdefault((way, step), []).append([tuple(one) for one in sent])
    return Counts(saves, messages)


def main(given: list[str] | None = None) -> None:
    """Counts, and prints two tables for each number of processes and leaves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--leaves", type=int, nargs="+", default=[3, 12])
    parser.add_argument("--local-job", help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.local_job:
        run_script(SCRIPT, options.processes[0], f"{options.local_job}/root", options.leaves[0], SAVES, devices=1)
        return
    counters = {"bucket": count_bucket, **({"local": count_local} if shutil.which("strace") else {})}
    for store, processes, leaves in itertools.product(counters, options.processes, options.leaves):
        print(f"\n{store}, {processes} processes, {leaves} arrays\n")
        counts = counters[str(store)](int(processes), int(leaves))
        for way in WAYS:
            written = sum(one.nbytes for one in counts.saves[way, SAVES] if one.kind == "PUT")
            print(f"| {way} | {counts.kinds(way)} | {written:,} bytes written |")
            for sent in counts.messages.get((way, SAVES), []):
                if sent:
                    print(
                        f"    messages: {[name for name, _, _ in sent]}, {sum(one for _, one, _ in sent):,} bytes sent"
                    )
        for version in ("v0", "v1"):
            more, less = counts.beyond_plain(version)
            print(f"{version} beyond plain: {more or 'nothing'}; plain beyond ours: {less or 'nothing'}")


if __name__ == "__main__":
    main()
