"""`python -m tests.fuzz [--seconds N] [--keep DIR] [TARGET…]`: all targets, or the named ones, in turn.

Each target runs under atheris in a process of its own, from its seeds and its saved inputs, and a crash, a hang or a
bomb ends it: the input is kept as `crash-…`, `timeout-…` or `oom-…` in DIR/TARGET beside the inputs that reached new
lines, and the run fails at its end.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

# One input: a hang is longer, and a bomb larger, than anything that a busy machine does to sound inputs.
_TIMEOUT_SECS = 30
_MAX_GROWTH_BYTES = 256 << 20
_INPUT_BYTES = 8192


def fuzz_one(name: str, seconds: int, keep: Path) -> None:
    """Fuzzes one target in this process and exits."""
    import atheris

    rooms = ("readers", "files", "extras", "operations.convert")
    with atheris.instrument_imports(include=[f"orbax_t5x.{room}" for room in rooms]):
        from tests.fuzz import corpus, mutations, targets  # instrumented as they load

    target = targets.TARGETS[name]
    scratch = Path(tempfile.mkdtemp())
    (scratch / "made").mkdir()
    check = target.make(scratch / "made")
    for data in corpus.inputs(name):
        check(data)  # imports and caches, which are no growth of a single input
    peak = _peak_bytes()

    def run(data: bytes) -> None:
        nonlocal peak
        check(data)
        before, peak = peak, _peak_bytes()
        assert peak - before < _MAX_GROWTH_BYTES, f"one input took {peak - before} bytes"

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        generator = random.Random(seed)

        def change(part: bytes) -> bytes:
            if generator.random() < 0.5:
                return mutations.random_bytes(generator)(part)
            return atheris.Mutate(part, len(part) + 16)

        return target.mutate(data, generator, change)[:max_size]

    begin = scratch / "begin"
    begin.mkdir()
    for number, data in enumerate(corpus.inputs(name)):
        (begin / str(number)).write_bytes(data)
    found = keep / name
    found.mkdir(parents=True, exist_ok=True)
    settings = {
        "max_total_time": seconds,
        "timeout": _TIMEOUT_SECS,
        "max_len": _INPUT_BYTES,
        "rss_limit_mb": 4096,
        "artifact_prefix": f"{found}/",
    }
    arguments = [sys.argv[0], *(f"-{key}={value}" for key, value in settings.items()), str(found), str(begin)]
    atheris.Setup(arguments, run, custom_mutator=mutate)
    atheris.Fuzz()


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> int:
    """Parses the command line and runs."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", help="which; all by default")
    parser.add_argument("--seconds", type=int, default=600, help="for all of them together")
    parser.add_argument("--keep", type=Path, help="where inputs are kept; a directory that goes away by default")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        fuzz_one(options.targets[0], options.seconds, options.keep)
    from tests.fuzz.targets import TARGETS  # the fuzzed process loads it instrumented

    names = options.targets or list(TARGETS)
    failed = []
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="fuzz", dir=memory) as scratch:
        keep = (options.keep or Path(scratch) / "keep").resolve()
        for name in names:
            command = [sys.executable, "-m", "tests.fuzz", "--here", name, "--keep", str(keep)]
            command += ["--seconds", str(max(1, options.seconds // len(names)))]
            place = Path(scratch) / name
            place.mkdir()
            environment = {**os.environ, "TMPDIR": str(place), "JAX_PLATFORMS": "cpu"}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            lines = done.stderr.splitlines()
            last = next((line for line in reversed(lines) if line.startswith("Done")), "stopped")
            print(f"{name}: {last}", flush=True)
            if done.returncode:
                failed.append(name)
                print("\n".join(lines[-60:]), flush=True)
    print(f"failed: {', '.join(failed)}" if failed else "no findings")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
