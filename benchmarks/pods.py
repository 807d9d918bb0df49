"""`python -m benchmarks.pods [--processes N …] [--formats F …] [--delay MS …] [--rate R]`: counts requests of pods.

Real processes (`jax.distributed`, CPU devices) plan and restore checkpoints of several formats, replicated, by rows and
by columns, with each way of `broadcast=`, from a store on the loopback that counts requests and bytes of each process.
All counts must equal those of `scale_model`, and those that the plan has shown; else it says where, and exits with 1.
With `--delay` the store waits before each answer, and with `--rate` it answers at most so many requests a second: the
times are compared with those of the model.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.pod_store import CountedRequest, LocalReads, RequestLog, counting_http, counting_local, counting_s3
from benchmarks.scale_model import DTYPE, FORMATS, Counts, Job, Shapes, Store, Stored, least_seconds, predict
from benchmarks.states import nested
from orbax_t5x.files.paths import url_scheme
from orbax_t5x.lazy import as_view
from tests.support.jax_job import run_script

# Larger than one window and than several; columns far from each other and near; what is less than a window; a scalar.
SHAPES: Shapes = {
    "target/embedding": (2048, 384),
    "target/kernel": (256, 2048),
    "target/narrow": (512, 64),
    "target/scale": (64,),
    "target/step": (),
}
_MIB = 1 << 20
LAYOUTS = ("replicated", "rows", "columns")
_SCRIPT = "from benchmarks.pods import work\nwork(sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]), tell)"


# -- checkpoints


def _arrays(shapes: Shapes) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {name: np.asarray(random.random(shape), DTYPE) for name, shape in shapes.items()}


def _write_safetensors(folder: Path, shapes: Shapes) -> str:
    import safetensors.numpy

    safetensors.numpy.save_file(_arrays(shapes), folder / "model.safetensors")
    return "model.safetensors"


def _write_bundle(folder: Path, shapes: Shapes) -> str:
    from tests.support.bundle_writer import bundle_of

    (folder / "bundle").mkdir()
    bundle_of(_arrays(shapes)).write(folder / "bundle")
    (index,) = folder.glob("bundle/*.index")
    return str(index.relative_to(folder))


def _write_t5x(folder: Path, shapes: Shapes) -> str:
    from tests.support.format_suites import write_t5x

    write_t5x(folder / "t5x", _arrays(shapes), chunks=lambda shape: FORMATS["t5x"].chunk_of(shape) or ())
    return "t5x"


def _write_orbax(folder: Path, shapes: Shapes) -> str:
    import jax
    import orbax.checkpoint as ocp

    def chunked(value: np.ndarray) -> ocp.SaveArgs:
        chunk = FORMATS["orbax"].chunk_of(value.shape) or ()
        return ocp.SaveArgs(chunk_byte_size=int(np.prod(chunk, initial=1)) * DTYPE.itemsize)

    tree = nested(_arrays(shapes))
    handler = ocp.PyTreeCheckpointHandler(use_compression=False)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(folder / "orbax", ocp.args.PyTreeSave(tree, save_args=jax.tree.map(chunked, tree)))
    return "orbax"


_WRITERS: Mapping[str, Callable[[Path, Shapes], str]] = {
    "safetensors": _write_safetensors,
    "bundle": _write_bundle,
    "t5x": _write_t5x,
    "orbax": _write_orbax,
}


_STORES = {"http": counting_http, "s3": counting_s3, "local": counting_local}


# -- one process


class Case(NamedTuple):
    """Restore of one checkpoint: its format and path, the layout of the target, and `broadcast=`."""

    format: str
    path: str
    layout: Any
    broadcast: Any


def work(root: str, shapes: Mapping[str, Sequence[int]], cases: Sequence[Any], tell: Callable[[Any], None]) -> None:
    """Restores each case in one process of a job, and tells when each stage began and ended, and what the plan shows.

    Args:
      root: URL or directory of all checkpoints.
      shapes: of the arrays of each.
      cases: as `Case` has them.
      tell: takes a JSON value for each case.
    """
    import jax
    from jax.experimental import multihost_utils
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import orbax_t5x as ot

    mesh = Mesh(np.asarray(jax.devices()), ("x",))
    marks: list[float] = []
    local = LocalReads(root) if url_scheme(root) is None else None

    def mark() -> None:
        if local is not None:
            local.note_native()
        multihost_utils.sync_global_devices("mark")
        marks.append(time.monotonic())
        multihost_utils.sync_global_devices("marked")

    for case in (Case(*one) for one in cases):
        job = Job(jax.process_count(), jax.local_device_count(), case.layout, case.broadcast)

        def placed(shape: Sequence[int], job: Job = job) -> jax.ShapeDtypeStruct:
            dimension = job.split(shape)
            spec = PartitionSpec() if dimension is None else PartitionSpec(*[None] * dimension, "x")
            return jax.ShapeDtypeStruct(tuple(shape), DTYPE, sharding=NamedSharding(mesh, spec))

        target = nested({name: placed(shape) for name, shape in shapes.items()})
        marks.clear()
        if local is not None:
            local.taken.clear()
        mark()
        plan = ot.plan_restore(f"{root}/{case.path}", target)
        mark()
        jax.block_until_ready(plan.execute(broadcast=case.broadcast))
        mark()
        shown = [entry["broadcast"] for entry in plan.to_json()["entries"]]
        planned = _planned(shown, case.broadcast)
        tell({"process": os.getpid(), "marks": marks, "plan": planned, "taken": local.taken if local else []})


def _planned(shown: Iterable[Mapping[str, Any]], broadcast: Any) -> list[int]:
    """Returns the requests and bytes of all processes for data, as the plan shows them."""
    ways = [
        one["once"] or one["own"] if (one["is_broadcast"] if broadcast == "auto" else broadcast) else one["own"]
        for one in shown
    ]
    return [sum(way[key] for way in ways) for key in ("requests", "bytes")]


# -- all processes


@dataclasses.dataclass
class Result:
    """Result of one case: what the store has counted of each process, what the plan shows of all, and the times."""

    case: Case
    counted: list[Counts]
    planned: list[int]
    strangers: int
    seconds: list[float]


def count(
    root: str, log: RequestLog, cases: Sequence[Case], shapes: Shapes, processes: int, devices: int
) -> list[Result]:
    """Restores each case by the processes of one job."""
    begun = len(log.requests)
    told = run_script(_SCRIPT, processes, root, json.dumps(shapes), json.dumps(cases), devices=devices)
    numbers = {one[0]["process"]: number for number, one in enumerate(told)}
    requests = log.requests[begun:]
    for one in (one for mine in told for one in mine):
        requests += [CountedRequest(at, one["process"], method, "", None, size) for method, size, at in one["taken"]]
    results: list[Result] = []
    for number, case in enumerate(cases):
        begin, planned, end = told[0][number]["marks"]
        opening, checks, data, nbytes = ([0] * processes for _ in Counts._fields)
        strangers = 0
        for one in requests:
            if not begin <= one.at < end:
                continue
            if (process := numbers.get(one.process)) is None:
                strangers += 1
            elif one.at < planned:
                opening[process] += 1
            elif one.method in ("HEAD", "open"):
                checks[process] += 1
            else:
                data[process] += 1
                nbytes[process] += one.nbytes
        counted = list(map(Counts, opening, checks, data, nbytes))
        results.append(Result(case, counted, told[0][number]["plan"], strangers, [planned - begin, end - planned]))
    return results


def differences(result: Result, stored: Stored, devices: int, store: Store = "http") -> list[str]:
    """Returns where the store's counts are not the model's, or not the plan's."""
    case, counted = result.case, result.counted
    job = Job(len(counted), devices, case.layout, case.broadcast)
    if store == "local":
        counted = [one._replace(checks=0) for one in counted]
    predicted = predict(stored, job, store)
    found = [
        f"process {process}: store {ours}, model {model}"
        for process, (ours, model) in enumerate(zip(counted, predicted, strict=True))
        if ours != model
    ]
    total = [sum(one.data for one in counted), sum(one.nbytes for one in counted)]
    nodes = stored.nodes * sum(bool(one.data) for one in predicted[1:]) if store == "local" else ()
    planned = [result.planned[0] + len(nodes), result.planned[1] + sum(nodes)]
    if total != planned:
        found.append(f"all processes: store {total}, plan {planned}")
    if result.strangers:
        found.append(f"{result.strangers} requests of unknown processes")
    return found


def write(folder: Path, name: str, shapes: Shapes) -> tuple[str, Stored]:
    """Writes a checkpoint of a format; returns its path in the folder, and what is stored."""
    import orbax_t5x as ot

    path = _WRITERS[name](folder, shapes)
    with ot.open_checkpoint(folder / path) as checkpoint:
        chunks = {array: as_view(leaf).leaves()[0].chunks for array, leaf in checkpoint.leaves.items()}
    nodes = [folder / path / "manifest.ocdbt", *(folder / path / "d").iterdir()] if name == "orbax" else []
    return path, Stored(FORMATS[name], shapes, chunks, tuple(node.stat().st_size for node in nodes))


def cases_of(written: Mapping[str, tuple[str, Stored]]) -> list[Case]:
    """Returns restores of checkpoints of some formats, in each layout and way."""
    return [
        Case(name, path, layout, broadcast)
        for name, (path, _) in written.items()
        for layout in LAYOUTS
        for broadcast in (False, True, "auto")
    ]


def print_counts(results: Sequence[Result]) -> None:
    """Prints the requests and bytes for data of all processes together, by number of processes."""
    numbers = sorted({len(one.counted) for one in results})
    by_case: dict[Case, dict[int, Result]] = {}
    for one in results:
        by_case.setdefault(one.case, {})[len(one.counted)] = one
    print("| format | layout | `broadcast` |", *[f"{number} processes |" for number in numbers])
    print("|---|---|---|" + "---|" * len(numbers))
    for case, by_number in by_case.items():
        row = [case.format, case.layout, f"`{case.broadcast!r}`".replace("'", '"')]
        for number in numbers:
            counted = by_number[number].counted
            row.append(f"{sum(one.data for one in counted):,}; {sum(one.nbytes for one in counted) / _MIB:.1f} MiB")
        print("|", " | ".join(row), "|")


def print_times(results: Iterable[Result], stored: Mapping[str, Stored], delay: float, rate: float) -> None:
    """Prints how many times as long as the model's least time the stages took for which that is a second or more."""
    ratios = sorted(
        measured / least
        for one in results
        for measured, least in zip(
            one.seconds, least_seconds(stored[one.case.format], one.counted, delay, rate), strict=True
        )
        if least >= 1
    )
    if ratios:
        middle = ratios[len(ratios) // 2]
        print(f"times over the model's, {len(ratios)} stages: {ratios[0]:.2f} to {ratios[-1]:.2f}, median {middle:.2f}")


def main() -> None:
    """Parses the command line and runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--devices", type=int, default=2, help="of each process")
    parser.add_argument("--formats", nargs="+", choices=_WRITERS, default=list(_WRITERS))
    parser.add_argument("--store", choices=_STORES, default="http")
    parser.add_argument("--delay", type=float, default=0.0, help="milliseconds")
    parser.add_argument("--rate", type=float, default=0.0, help="answers in a second")
    parser.add_argument("--json", type=Path, help="file to which all figures are written")
    given = parser.parse_args()
    results: list[Result] = []
    failures = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        written = {name: write(folder, name, SHAPES) for name in given.formats}
        with _STORES[given.store](folder) as (url, log):
            log.delay, log.rate = given.delay / 1000, given.rate
            for processes in given.processes:
                for one in count(url, log, cases_of(written), SHAPES, processes, given.devices):
                    results.append(one)
                    for text in differences(one, written[one.case.format][1], given.devices, given.store):
                        failures += 1
                        print(f"{processes} processes, {one.case}: {text}", flush=True)
    print_counts(results)
    if given.delay or given.rate:
        print_times(results, {name: stored for name, (_, stored) in written.items()}, given.delay / 1000, given.rate)
    print(f"{len(results)} restores; {failures} counts differ from the model or the plan")
    if given.json is not None:
        given.json.write_text(json.dumps([dataclasses.asdict(one) for one in results]))
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
