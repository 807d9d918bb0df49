"""`python -m benchmarks.run [--folder DIR] [--runs N] [NAME…]`: all comparisons, or the named ones, as tables."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks import data
from benchmarks.measure import compare


def imports(_: Path, runs: int) -> None:
    """What importing costs beyond Orbax."""
    compare(
        "import", {"import orbax_t5x, orbax": ("import_ours", ()), "import orbax": ("import_orbax", ())}, max(runs, 7)
    )


def bundle(folder: Path, runs: int) -> None:
    """A 1 GB bundle into 1,400 sharded leaves: ours, TensorFlow and device_put, plain Orbax on the same values."""
    prefix, state = str(data.bundle(folder)), str(data.orbax_state(folder))
    for layout in ("rows", "columns"):
        compare(
            f"1 GB T5.1.1-base bundle with slots, 8 devices, {layout}",
            {
                "orbax_t5x, crc checked": ("bundle_ours", (prefix, state, layout)),
                "orbax_t5x, verify='off'": ("bundle_ours", (prefix, state, layout, "unverified")),
                "TensorFlow + device_put": ("bundle_tensorflow", (prefix, state, layout)),
                "plain Orbax, same values": ("orbax_plain", (state, layout)),
                "reading the bytes": ("read_floor", (prefix,)),
            },
            runs,
        )


def orbax(folder: Path, runs: int) -> None:
    """A 0.96 GB Orbax checkpoint through the plan, against plain Orbax."""
    path = str(data.orbax_layers(folder))
    for layout in ("rows", "columns"):
        compare(
            f"0.96 GB Orbax checkpoint of 24 layers, 8 devices, {layout}",
            {
                "orbax_t5x": ("orbax_ours", (path, layout)),
                "plain Orbax": ("orbax_plain", (path, layout)),
                "reading the bytes": ("read_floor", (path,)),
            },
            runs,
        )


def rename(folder: Path, runs: int) -> None:
    """A full rename while restoring: large leaves against plain Orbax, many small ones against Orbax's own transforms,
    too.
    """
    large, small = str(data.orbax_layers(folder)), str(data.orbax_small(folder))
    compare(
        "0.96 GB Orbax checkpoint, every leaf renamed, 8 devices, rows",
        {
            "orbax_t5x, renamed": ("rename_ours", (large, "rows")),
            "plain Orbax, not renamed": ("orbax_plain", (large, "rows")),
        },
        runs,
    )
    compare(
        "3,000 small leaves, every leaf renamed, 8 devices, replicated",
        {
            "orbax_t5x, renamed": ("rename_ours", (small, "replicated")),
            "plain Orbax, not renamed": ("orbax_plain", (small, "replicated")),
            "Orbax transforms": ("rename_orbax_transforms", (small, "replicated")),
        },
        max(1, runs // 2),
    )


def stack(folder: Path, runs: int) -> None:
    """Stacking 24 layers while restoring, against restoring and `jnp.stack`."""
    path = str(data.orbax_layers(folder))
    compare(
        "24 layers of 0.96 GB stacked on axis 1, 8 devices, rows",
        {
            "orbax_t5x StackLayers": ("stack_ours", (path, "rows")),
            "plain Orbax + jnp.stack": ("stack_plain", (path, "rows")),
            "reading the bytes": ("read_floor", (path,)),
        },
        runs,
    )


def planning(folder: Path, runs: int) -> None:
    """Planning is linear in leaves."""
    for count in (10_000, 100_000):
        path = str(data.many_leaves(folder, count))
        compare(f"planning {count:,} leaves with 100 rules", {"orbax_t5x": ("plan_many", (path,))}, runs)


def rules(_: Path, runs: int) -> None:
    """The table of rules, against a loop over compiled patterns, where rules match early, late and never."""
    for case in ("early", "families", "none"):
        compare(
            f"10,000 names and 100 rules, {case}",
            {"RuleTable": ("match_rules", (case, "table")), "loop of fullmatch": ("match_rules", (case, "loop"))},
            runs,
        )


def diff(folder: Path, runs: int) -> None:
    """A 0.96 GB Orbax checkpoint compared with itself, by bits and number by number."""
    path = str(data.orbax_layers(folder))
    peer = {"restored by Orbax, compared by NumPy": ("diff_numpy", (path, path))}
    compare("0.96 GB compared with itself", {"ot.diff": ("diff_ours", (path, path)), **peer}, runs)
    cast = {"ot.diff": ("diff_ours", (path, path, "cast"))}
    compare("0.96 GB compared with itself, one side cast to float64", {**cast, **peer}, runs)


# Each format: the label of its own reader.
_FORMATS = {
    "t5x_gzip": "T5X's way through TensorStore",
    "t5x_zstd": "T5X's way through TensorStore",
    "safetensors": "safetensors.flax.load_file",
    "msgpack": "flax msgpack_restore",
    "orbax": "plain Orbax",
}
_FORMAT_JOBS = "benchmarks.format_jobs"


def opening(folder: Path, runs: int) -> None:
    """All names, shapes and dtypes of 0.99 GB in each format."""
    for name, peer in _FORMATS.items():
        path, reader = str(data.in_format(folder, name)), name.partition("_")[0]
        ways = {"open_checkpoint": ("open_ours", (path,)), peer: (f"open_{reader}", (path,))}
        compare(f"opening {name}", ways, runs, _FORMAT_JOBS)
    prefix = str(data.bundle(folder))
    ways = {"open_checkpoint": ("open_ours", (prefix,)), "TensorFlow": ("open_tf_bundle", (prefix,))}
    compare("opening tf_bundle, with slots", ways, runs, _FORMAT_JOBS)


def listing(folder: Path, runs: int) -> None:
    """All names, shapes and dtypes of T5.1.1-XXL, 45 GB that take no disk: a bundle, and a step of T5X's."""
    ways = {name: ("open_ours", (str(path),)) for name, path in data.sparse(folder).items()}
    compare("opening 45 GB, 1,553 leaves", ways, runs, _FORMAT_JOBS)


def whole(folder: Path, runs: int) -> None:
    """0.99 GB in each format, on one device and over 8."""
    for name, peer in _FORMATS.items():
        path, reader = str(data.in_format(folder, name)), name.partition("_")[0]
        for layout in ("single", "rows", "columns"):
            ways = {
                "ot.restore": ("whole_ours", (path, layout)),
                peer: (f"whole_{reader}", (path, layout)),
                "reading the bytes": ("read_floor", (path,)),
            }
            compare(f"whole restore of {name}, {layout}", ways, runs, _FORMAT_JOBS)


def part(folder: Path, runs: int) -> None:
    """The first eighth of each array of 0.99 GB in each format."""
    for name, peer in _FORMATS.items():
        path, reader = str(data.in_format(folder, name)), name.partition("_")[0]
        ways = {"ot.restore": ("part_ours", (path,)), peer: (f"part_{reader}", (path,))}
        compare(f"one eighth of each array of {name}", ways, runs, _FORMAT_JOBS)


def verifying(folder: Path, runs: int) -> None:
    """What checking costs: the share of a restore is 1 - 1 / r, with the second ratio r: at most 15 % up to 1.18."""
    prefix, state = str(data.bundle(folder)), str(data.orbax_state(folder))
    for layout in ("rows", "columns", "single"):
        ways = {
            "verify='touched'": ("bundle_ours", (prefix, state, layout)),
            "verify='off'": ("bundle_ours", (prefix, state, layout, "unverified")),
        }
        compare(f"verification of a 1 GB bundle, {layout}", ways, runs)


ALL: dict[str, Callable[[Path, int], None]] = {
    "imports": imports,
    "bundle": bundle,
    "orbax": orbax,
    "rename": rename,
    "stack": stack,
    "diff": diff,
    "planning": planning,
    "rules": rules,
    "opening": opening,
    "listing": listing,
    "whole": whole,
    "part": part,
    "verifying": verifying,
}


def main() -> None:
    """Parses the command line and runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*ALL, []], help="which comparisons; all by default")
    parser.add_argument("--folder", type=Path, help="where the checkpoints are kept between calls (several GB)")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name in options.names or ALL:
            ALL[name](folder.resolve(), options.runs)


if __name__ == "__main__":
    main()
