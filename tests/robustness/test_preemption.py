"""A run that is killed at random moments, and started again each time, ends with the bits of one that is not."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.robustness import preempted_training
from tests.support.xla import xla_flags

pytestmark = pytest.mark.slow

STEPS = 8
KILLS = 3


def run(source, root, result, kill_after=None):
    """One start of the job; tells what it printed, and whether it was killed."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUMPY_DTYPE_PROMOTION": "standard",  # Optax raises floats to the power of integer counts
        "XLA_FLAGS": xla_flags(2),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    if kill_after is not None:
        environment[preempted_training.KILL_AFTER] = str(kill_after)
    command = [
        sys.executable,
        "-m",
        "tests.robustness.preempted_training",
        str(source),
        str(root),
        str(STEPS),
        str(result),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode in (0, -signal.SIGALRM), done.stderr[-3000:]
    return done.stdout.split(), done.returncode != 0


def bits(result):
    with np.load(result) as arrays:
        return {name: (arrays[name].dtype.str, arrays[name].tobytes()) for name in arrays}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / "params"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, preempted_training.parameters())
    return path


def test_a_killed_run_ends_like_one_that_is_not(source, tmp_path):
    started = time.monotonic()
    assert run(source, tmp_path / "whole", tmp_path / "whole.npz") == (["initialized", "0"], False)
    # The whole process, imports included: so some of the moments come after the end of what is left to do.
    longest = time.monotonic() - started
    moments = random.Random(20)
    told = []
    for _ in range(KILLS):
        told.append(run(source, tmp_path / "killed", tmp_path / "killed.npz", moments.uniform(0, longest / 2)))
    told.append(run(source, tmp_path / "killed", tmp_path / "killed.npz"))
    assert not told[-1][1]
    assert bits(tmp_path / "killed.npz") == bits(tmp_path / "whole.npz"), told
    # The steps never go back: none that was finished is lost.
    steps = [int(printed[1]) for printed, _ in told if printed]
    assert steps == sorted(steps), told
