"""`python -m benchmarks.regress_job CHECKOUT MODULE NAME ARGUMENTS…`: one job with the package of another checkout."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from benchmarks.measure import Clock


def run_with(checkout: str, module: str, name: str, *arguments: str) -> None:
    """Runs a job of these benchmarks with the package of a checkout, which is imported first.

    The job's first argument is the checkpoint. It is opened before: a checkout may import a format when it opens one.
    """
    clock, function = Clock(), getattr(importlib.import_module(f"benchmarks.{module}"), name)
    sys.path.insert(0, checkout)
    import orbax_t5x

    found = Path(orbax_t5x.__file__).resolve()
    if not found.is_relative_to(Path(checkout).resolve()):
        raise RuntimeError(f"the package is {found}, not that of {checkout}")
    sys.path.remove(checkout)
    with orbax_t5x.open_checkpoint(arguments[0]):
        pass
    function(clock, *arguments)


if __name__ == "__main__":
    run_with(*sys.argv[1:])
