"""Jobs that are killed at random moments find their newest step whole; `killed_training` beside this kills more."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

KILLS = 16
# Twenty times what it takes on a machine with nothing else to do.
_TIMEOUT_SECS = 800


def test_no_kill_loses_a_step_or_leaves_half_of_one(tmp_path):
    repository = Path(__file__).parents[2]
    command = [
        sys.executable,
        "-m",
        "tests.robustness.killed_training",
        "--times",
        str(KILLS),
        "--seed",
        "1",
        "--folder",
        str(tmp_path),
    ]
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    done = subprocess.run(
        command, env=environment, cwd=repository, capture_output=True, text=True, timeout=_TIMEOUT_SECS, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    told = re.match(r"(\d+) kills \(.*after 'saving'.*\), (\d+) times whole", done.stdout)
    assert told is not None and int(told[1]) == KILLS, done.stdout
    # Four layouts are measured first and looked at last.
    assert int(told[2]) >= 8
