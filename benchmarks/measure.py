"""Runs two or more ways to do one job in turn, each in a process of its own, and prints medians, ratios and peak
memory.

A job is a function in `benchmarks.jobs` that returns nothing; it calls `Clock.start()` when its imports are done. Times
are given with and without imports, and beside wall time stands the processor time of the process, user and system,
which other work on the machine changes less, and its minor faults. Memory is warmed before: a virtual machine whose
host takes idle memory back pays for cold memory, whichever job happens to be the first to use it. A ratio is the median
of the ratios of the rounds: in one round the ways run one after the other, so that both have met about the same load.
Peak memory is the growth of the resident set over what stood before the job began (imports and devices included), read
from the kernel's high-water mark, which is reset at that moment.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

_MIB = 1 << 20
# More than any job takes at once.
_WARM_BYTES = 3 << 30


def resident_bytes(field: str = "VmRSS") -> int:
    """A field of /proc/self/status, in bytes."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def reset_peak() -> None:
    """Resets the high-water mark of the resident set to what it is now."""
    with open("/proc/self/clear_refs", "w") as control:
        control.write("5")


def warm_memory() -> None:
    """Touches as much memory as a job may take, and gives it back to the system."""
    with mmap.mmap(-1, _WARM_BYTES) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for start in range(0, _WARM_BYTES, mmap.PAGESIZE):
            memory[start] = 1


def processor_seconds() -> float:
    """User and system time of this process and all its threads so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Clock:
    """Measures one job inside its process."""

    def __init__(self) -> None:
        self.born = time.perf_counter()

    def start(self) -> None:
        """Imports are done and devices are there: the job itself begins."""
        reset_peak()
        self.before_bytes = resident_bytes()
        self.usage_started = resource.getrusage(resource.RUSAGE_SELF)
        self.started = time.perf_counter()

    def stop(self, **extra: float | Callable[[], float]) -> None:
        """The job is done and its result is held; figures that take time to compute are functions, called last."""
        stopped = time.perf_counter()
        usage, before = resource.getrusage(resource.RUSAGE_SELF), self.usage_started
        user, system = usage.ru_utime - before.ru_utime, usage.ru_stime - before.ru_stime
        peak = resident_bytes("VmHWM")
        print(
            json.dumps(
                {
                    "seconds": stopped - self.started,
                    "with_import_seconds": stopped - self.born,
                    "processor_seconds": user + system,
                    "user_seconds": user,
                    "system_seconds": system,
                    "minor_faults": usage.ru_minflt - before.ru_minflt,
                    "with_import_processor_seconds": usage.ru_utime + usage.ru_stime,
                    "peak_growth_bytes": peak - self.before_bytes,
                    **{key: value() if callable(value) else value for key, value in extra.items()},
                }
            ),
            flush=True,
        )


# What is compared: the figure, its heading, how it is printed, and what it is divided by.
_COMPARED = (
    ("seconds", "s", ".3g", 1),
    ("processor_seconds", "CPU s", ".3g", 1),
    ("with_import_seconds", "s with imports", ".2f", 1),
    ("with_import_processor_seconds", "CPU s with imports", ".2f", 1),
    ("peak_growth_bytes", "peak growth MiB", ",.0f", _MIB),
)
# What is printed beside it.
_SHOWN = (("user_seconds", "user s", ".3g"), ("system_seconds", "system s", ".3g"), ("minor_faults", "faults", ",.0f"))

_NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"

Runs = dict[str, list[dict[str, float]]]


def run_job(
    name: str, arguments: Sequence[str], module: str = "benchmarks.jobs", environment: Mapping[str, str] | None = None
) -> dict[str, float]:
    """One run in a fresh process; its last line of output is the measurement."""
    command = [sys.executable, "-m", module, name, *arguments]
    # Without bytecode each process would compile this package again, which a measured job imports as it goes on.
    environment = {key: value for key, value in (environment or os.environ).items() if key != _NO_BYTECODE}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def compare(title: str, ways: dict[str, tuple[str, Sequence[str]]], runs: int, module: str = "benchmarks.jobs") -> None:
    """Alternates the ways `runs` times (after one unmeasured round that warms the page cache) and prints a table.

    Args:
      title: the heading.
      ways: label -> (job, its arguments). The first way is ours; ratios are ours over each other way's.
      runs: measured rounds.
      module: that holds the jobs.
    """
    measured: Runs = {label: [] for label in ways}
    load = os.getloadavg()[0]
    warm_memory()
    for round_number in range(runs + 1):
        for label, (job, arguments) in ways.items():
            figures = run_job(job, arguments, module)
            if round_number:
                measured[label].append(figures)
    _print(f"{title} ({runs} alternating runs; load {load:.1f} to {os.getloadavg()[0]:.1f})", measured)


def _print(title: str, measured: Runs) -> None:
    """Medians of each way, and medians of the ratios of the rounds."""
    ours = next(iter(measured.values()))
    headings = [cell for _, heading, *_ in _COMPARED for cell in (heading, "ours/it")]
    headings += [heading for _, heading, _ in _SHOWN]
    print(f"\n## {title}\n\n| way | min–max s | {' | '.join(headings)} | other |")
    print("|---" * (len(headings) + 3) + "|")
    for label, runs in measured.items():
        times = [run["seconds"] for run in runs]
        cells = [label, f"{min(times):.3g}–{max(times):.3g}"]
        for key, _, form, unit in _COMPARED:
            cells.append(format(statistics.median(run[key] for run in runs) / unit, form))
            ratios = [mine[key] / max(its[key], 1e-9) for mine, its in zip(ours, runs, strict=True)]
            cells.append(f"{statistics.median(ratios):.2f}")
        cells += [format(statistics.median(run[key] for run in runs), form) for key, _, form in _SHOWN]
        compared = {key for key, *_ in (*_COMPARED, *_SHOWN)}
        others = [key for key in runs[0] if key not in compared]
        cells.append(", ".join(f"{key} {statistics.median(run[key] for run in runs):,.0f}" for key in others))
        print("| " + " | ".join(cells) + " |")
    sys.stdout.flush()
