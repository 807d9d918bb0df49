"""One of several processes that convert together.

`python -m tests.multihost.jobs.convert_worker COORDINATOR COUNT INDEX FOLDER`.

Does several jobs one after the other, as starting takes longest, and writes what became of each as JSON into a file.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

import jax

import orbax_t5x as ot
from orbax_t5x.lazy.read_stats import ReadStats
from orbax_t5x.operations.convert import job as conversion
from orbax_t5x.operations.convert.journal import Journal

_LIMIT_BYTES = 4 << 20


def counted(function):
    """How many bytes of the source this process reads meanwhile, and the report."""
    counts = []
    count = ReadStats.count

    def count_reads(self, bytes_read, *others, **more):
        if self.execution is self:  # parts count for the whole again
            counts.append(bytes_read)
        count(self, bytes_read, *others, **more)

    ReadStats.count = count_reads
    try:
        report = function()
    finally:
        ReadStats.count = count
    return {"read": sum(counts), "leaves": report.leaves, "bytes": report.bytes, "kept": report.kept_bytes}


def convert(source, destination, **keywords):
    return lambda: ot.convert(source, destination, memory_limit_bytes=_LIMIT_BYTES, **keywords)


class Abandoned(BaseException):
    """Stands for a kill: the work directory stays, and its locks end."""


def abandon(work, *_):
    work._lock.close()
    raise Abandoned


def leave(source, destination):
    """All processes stop after some pieces as if they were killed."""
    seen = []

    def progress(*_):
        seen.append(1)
        if len(seen) == 4:
            raise Abandoned

    leaving = conversion.WorkDirectory.__exit__
    conversion.WorkDirectory.__exit__ = abandon
    try:
        ot.convert(source, destination, memory_limit_bytes=_LIMIT_BYTES, progress=progress)
    except (Abandoned, ot.errors.CheckpointError):  # the others hear of it
        pass
    finally:
        conversion.WorkDirectory.__exit__ = leaving


def failing(source, destination, index):
    """One process cannot note what it has written."""
    if jax.process_index() == index:
        add, Journal.add = Journal.add, full
    try:
        ot.convert(source, destination, memory_limit_bytes=_LIMIT_BYTES)
    finally:
        if jax.process_index() == index:
            Journal.add = add


async def full(*_):
    raise OSError(28, "No space left on device")


def outcome(function):
    try:
        return function()
    except ot.errors.CheckpointError as error:
        return [type(error).__name__, str(error)]


def main(coordinator, count, index, folder):
    count, index, folder = int(count), int(index), Path(folder)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, count, index, initialization_timeout=800)
    source, damaged = folder / "source" / "model", folder / "damaged" / "model"
    told = {}
    for format in ("orbax", "safetensors"):
        told[format] = counted(convert(source, folder / format, format=format))
    other = folder / f"other_{min(index, 1)}"
    told["other destinations"] = outcome(convert(source, other))
    told["exists"] = outcome(convert(source, folder / "orbax"))
    told["damaged"] = outcome(convert(damaged, folder / "of_damaged"))
    for one in (0, 1):
        told[f"process {one} fails"] = outcome(partial(failing, source, folder / "failed", one))
    leave(source, folder / "left")
    told["left"] = counted(convert(source, folder / "left"))
    (folder / f"told_{index}").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
