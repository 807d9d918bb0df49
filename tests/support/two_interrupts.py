"""Interrupts calls twice at random moments.

Run as `python -m tests.support.two_interrupts DIRECTORY SECONDS SEED`.

Prints how many calls were interrupted, and a line for each that ended otherwise, left files, or failed the next time.
"""

import itertools
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import safetensors.numpy

import orbax_t5x as ot

ROOT, SECONDS, SEED = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
SOURCE = ROOT / "model.safetensors"
SAVES = ROOT / "saves"
NUMBERS = itertools.count()
LEAVES = 30


def restore():
    assert len(ot.restore(SOURCE, None)["p"]) == LEAVES


def convert():
    ot.convert(SOURCE, ROOT / "item", overwrite=True)


def convert_to_files():
    ot.convert(SOURCE, ROOT / "files", format="safetensors", overwrite=True)


def diff():
    assert ot.diff(SOURCE, SOURCE).equal


def save():
    """Saves to a new place: what Orbax was writing to the last may go on for a moment after an interrupt."""
    directory = SAVES / str(next(NUMBERS))
    with ot.open_checkpoint(SOURCE) as opened, ocp.Checkpointer(ot.TrainStateHandler()) as checkpointer:
        tree = {name.replace("/", "."): view for name, view in opened.leaves.items()}
        checkpointer.save(directory, args=ot.args.TrainStateSave(tree, provenance=()))


def interrupt(*_):
    raise KeyboardInterrupt


def interrupted_twice(call, first, second):
    """Calls a function with two signals; returns the name of the exception that left it, or None."""
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, first, second)
            call()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except BaseException as error:
        signal.setitimer(signal.ITIMER_REAL, 0)
        return f"{type(error).__name__}: {error}"
    return None


def main():
    safetensors.numpy.save_file({f"p/{n}": np.full((64, 64), n, np.float32) for n in range(LEAVES)}, SOURCE)
    calls = restore, convert, convert_to_files, diff, save
    usual = {}
    for call in calls:
        call()  # what is made once
        began = time.monotonic()
        call()
        usual[call] = time.monotonic() - began
    signal.signal(signal.SIGALRM, interrupt)
    threading.Thread(target=lambda: [sum(range(2000)) for _ in iter(int, 1)], daemon=True).start()
    rng, interrupts, there = random.Random(SEED), 0, set(os.listdir(ROOT))
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        call = rng.choice(calls)
        raised = interrupted_twice(call, rng.uniform(0.001, max(0.02, usual[call])), rng.uniform(0.001, 0.02))
        if raised is not None and not raised.startswith("KeyboardInterrupt"):
            print(call.__name__, "raised", raised)
        interrupts += raised is not None
        try:
            call()
        except BaseException as error:
            print(call.__name__, "cannot be called again:", type(error).__name__, error)
        if left := set(os.listdir(ROOT)) - there:
            print(call.__name__, "left", left)
    print("interrupted", interrupts)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
