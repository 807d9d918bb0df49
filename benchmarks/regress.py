"""`python -m benchmarks.regress OLD NEW [--folder DIR] [--scale S] [--rounds N] [--huge-pages on|off|both|ours]
[JOB…]`: the package of one checkout beside that of another.

The same jobs, from this checkout, run with the package of either one in turn, each run in a process of its own. Printed
are medians of both and the median of the ratios of the rounds, NEW over OLD, with its quartiles: of processor time
(user and system together), user time, system time, wall time, minor faults and the growth of the resident set.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import data
from benchmarks.measure import run_job, warm_memory

FIGURES = (
    ("processor_seconds", "CPU s", ".3f", 1),
    ("user_seconds", "user s", ".3f", 1),
    ("system_seconds", "system s", ".3f", 1),
    ("with_import_processor_seconds", "CPU s with imports", ".3f", 1),
    ("seconds", "wall s", ".3f", 1),
    ("minor_faults", "minor faults", ",.0f", 1),
    ("peak_growth_bytes", "peak growth MiB", ",.0f", 1 << 20),
)
_VARIABLE = "NUMPY_MADVISE_HUGEPAGE"
# Its values; None: not set, and the package decides.
_HUGE_PAGES: dict[str, tuple[str | None, ...]] = {"on": ("1",), "off": ("0",), "both": ("1", "0"), "ours": (None,)}

Job = tuple[str, str, Sequence[str]]
"""The module and the name of a function, and its arguments."""

# Each job by name: of a folder for checkpoints, and a scale of 1 for 10,000 leaves or a gigabyte.
_JOBS: dict[str, Callable[[Path, float], Job]] = {
    "planning": lambda folder, scale: ("jobs", "plan_many", [str(data.many_leaves(folder, _count(10_000, scale)))]),
    "small": lambda folder, scale: (
        "jobs",
        "rename_ours",
        [str(data.orbax_small(folder, _count(3_000, scale))), "replicated"],
    ),
    "opening": lambda folder, scale: ("format_jobs", "open_ours", [str(data.sparse(folder)["bundle"])]),
    "rows": lambda folder, scale: ("format_jobs", "whole_ours", [str(data.plain_bundle(folder, scale)), "rows"]),
    "columns": lambda folder, scale: ("format_jobs", "whole_ours", [str(data.plain_bundle(folder, scale)), "columns"]),
    "orbax": lambda folder, scale: ("jobs", "orbax_ours", [str(data.orbax_layers(folder, _count(24, scale))), "rows"]),
    "rename": lambda folder, scale: (
        "jobs",
        "rename_ours",
        [str(data.orbax_layers(folder, _count(24, scale))), "rows"],
    ),
    "stack": lambda folder, scale: ("jobs", "stack_ours", [str(data.orbax_layers(folder, _count(24, scale))), "rows"]),
}


def _count(full: int, scale: float) -> int:
    return max(1, round(full * scale))


def compare(title: str, job: Job, checkouts: Sequence[Path], rounds: int, huge_pages: str | None) -> list[str]:
    """Runs a job with both checkouts in alternating processes; returns the rows of its table.

    The first round, which warms the page cache, is left out where there are several.
    """
    environment = {key: value for key, value in os.environ.items() if key != _VARIABLE}
    if huge_pages is not None:
        environment[_VARIABLE] = huge_pages
    runs: tuple[list[dict[str, float]], list[dict[str, float]]] = ([], [])
    for _ in range(rounds + 1 if rounds > 1 else 1):
        for checkout, measured in zip(checkouts, runs, strict=True):
            module, name, arguments = job
            job_arguments = [module, name, *arguments]
            measured.append(run_job(str(checkout), job_arguments, "benchmarks.regress_job", environment))
    kept = [measured[-rounds:] for measured in runs]
    label = title if huge_pages is None else f"{title}, huge pages {'on' if huge_pages == '1' else 'off'}"
    return [f"| {label} | {' | '.join(row)} |" for row in figures_of(*kept)]


def figures_of(old: Sequence[dict[str, float]], new: Sequence[dict[str, float]]) -> list[list[str]]:
    """Returns for each figure its heading, both medians, and the median and the quartiles of the ratios."""
    rows: list[list[str]] = []
    for key, heading, form, unit in FIGURES:
        ratios = [after[key] / max(before[key], 1e-9) for before, after in zip(old, new, strict=True)]
        low, middle, high = statistics.quantiles(ratios, method="inclusive") if len(ratios) > 1 else ratios * 3
        medians = [format(statistics.median(run[key] for run in runs) / unit, form) for runs in (old, new)]
        rows.append([heading, *medians, f"{middle:.2f}", f"{low:.2f} to {high:.2f}"])
    return rows


def main() -> None:
    """Parses the command line, makes the checkpoints and runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path, help="a checkout")
    parser.add_argument("new", type=Path, help="another one")
    parser.add_argument("jobs", nargs="*", help=f"which of {list(_JOBS)}; all by default")
    parser.add_argument("--folder", type=Path, help="where the checkpoints are kept between calls (2 GB)")
    parser.add_argument("--scale", type=float, default=1, help="of the checkpoints: 1 is 1 GB, or 10,000 leaves")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--huge-pages", choices=[*_HUGE_PAGES], default="ours", help="for NumPy's arrays from 4 MiB")
    options = parser.parse_intermixed_args()
    checkouts = [options.old.resolve(), options.new.resolve()]
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        print(f"| {options.rounds} rounds | figure | old | new | ratio | quartiles |\n|---|---|---|---|---|---|")
        for name in options.jobs or _JOBS:
            job = _JOBS[name](folder, options.scale)
            warm_memory()
            for huge_pages in _HUGE_PAGES[options.huge_pages]:
                print("\n".join(compare(name, job, checkouts, options.rounds, huge_pages)), flush=True)


if __name__ == "__main__":
    main()
