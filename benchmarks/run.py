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
            },
            runs,
        )


def orbax(folder: Path, runs: int) -> None:
    """A 0.96 GB Orbax checkpoint through the plan, against plain Orbax."""
    path = str(data.orbax_layers(folder))
    for layout in ("rows", "columns"):
        compare(
            f"0.96 GB Orbax checkpoint of 24 layers, 8 devices, {layout}",
            {"orbax_t5x": ("orbax_ours", (path, layout)), "plain Orbax": ("orbax_plain", (path, layout))},
            runs,
        )


ALL: dict[str, Callable[[Path, int], None]] = {"imports": imports, "bundle": bundle, "orbax": orbax}


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
