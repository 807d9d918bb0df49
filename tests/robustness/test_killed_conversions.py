"""Some kills of conversions at random moments; `tests.robustness.killed_conversions` makes as many as one likes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

KILLS = 10


def test_a_kill_at_any_moment_leaves_the_old_checkpoint_or_the_new_one():
    """In a process of its own: children are forked from it, which is safe only before JAX has a backend."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.robustness.killed_conversions", "--times", str(KILLS), "--seed", "11"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rounds = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    assert sum(kills for _, kills in rounds) >= KILLS
