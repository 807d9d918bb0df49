"""Runs two or more ways to do one job in turn, each in a process of its own, and prints medians, ratios and peak
memory.

A job is a function in `benchmarks.jobs` that returns nothing; it calls `Clock.start()` when its imports are done. Times
are given with and without imports. Peak memory is the growth of the resident set over what stood before the job began
(imports and devices included), read from the kernel's high-water mark, which is reset at that moment.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

_MIB = 1 << 20


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


class Clock:
    """Measures one job inside its process."""

    def __init__(self) -> None:
        self.born = time.perf_counter()

    def start(self) -> None:
        """Imports are done and devices are there: the job itself begins."""
        reset_peak()
        self.before_bytes = resident_bytes()
        self.started = time.perf_counter()

    def stop(self, **extra: float) -> None:
        """The job is done and its result is held."""
        stopped = time.perf_counter()
        print(
            json.dumps(
                {
                    "seconds": stopped - self.started,
                    "with_import_seconds": stopped - self.born,
                    "peak_growth_bytes": resident_bytes("VmHWM") - self.before_bytes,
                    **extra,
                }
            ),
            flush=True,
        )


@dataclasses.dataclass(frozen=True)
class Result:
    """Medians over the runs of one way."""

    seconds: float
    with_import_seconds: float
    peak_growth_bytes: float
    extra: dict[str, float]


def run_job(name: str, arguments: Sequence[str], environment: dict[str, str] | None = None) -> dict[str, float]:
    """One run in a fresh process; its last line of output is the measurement."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.jobs", name, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **(environment or {})},
    )
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def compare(title: str, ways: dict[str, tuple[str, Sequence[str]]], runs: int) -> dict[str, Result]:
    """Alternates the ways `runs` times (after one unmeasured round that warms the page cache) and prints a table.

    Args:
      title: the heading.
      ways: label -> (job, its arguments). The first way is ours; ratios are ours over each other way's.
      runs: measured rounds.
    """
    measured: dict[str, list[dict[str, float]]] = {label: [] for label in ways}
    for round_number in range(runs + 1):
        for label, (job, arguments) in ways.items():
            figures = run_job(job, arguments)
            if round_number:
                measured[label].append(figures)
    results = {label: _summary(figures) for label, figures in measured.items()}
    _print(title, results, measured, runs)
    return results


def _summary(figures: list[dict[str, float]]) -> Result:
    median = {key: statistics.median(run[key] for run in figures) for key in figures[0]}
    core = ("seconds", "with_import_seconds", "peak_growth_bytes")
    return Result(*(median[key] for key in core), {key: value for key, value in median.items() if key not in core})


def _print(title: str, results: dict[str, Result], measured: dict[str, list[dict[str, float]]], runs: int) -> None:
    ours = next(iter(results.values()))
    print(f"\n## {title} ({runs} alternating runs, medians)\n")
    print("| way | s | min–max s | ours/it | s with imports | ours/it | peak growth MiB | ours/it | other |")
    print("|---|---|---|---|---|---|---|---|---|")
    for label, result in results.items():
        times = [run["seconds"] for run in measured[label]]
        extra = ", ".join(f"{key} {value:,.0f}" for key, value in result.extra.items())
        cells = [
            label,
            f"{result.seconds:.2f}",
            f"{min(times):.2f}–{max(times):.2f}",
            f"{ours.seconds / result.seconds:.2f}",
            f"{result.with_import_seconds:.2f}",
            f"{ours.with_import_seconds / result.with_import_seconds:.2f}",
            f"{result.peak_growth_bytes / _MIB:,.0f}",
            f"{ours.peak_growth_bytes / max(1, result.peak_growth_bytes):.2f}",
            extra,
        ]
        print("| " + " | ".join(cells) + " |")
    sys.stdout.flush()
