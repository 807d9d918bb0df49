"""Command line of programs that kill a job at random moments."""

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def run_by_options(run: Callable[[Path, int, int], object], *, times: int) -> None:
    """Calls `run(directory, times, seed)` in a temporary directory; `--times` and `--seed` set the two numbers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=times)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with tempfile.TemporaryDirectory() as directory:
        run(Path(directory), options.times, options.seed)
