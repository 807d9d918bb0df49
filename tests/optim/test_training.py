"""Fine-tuning from a real bundle goes on bit for bit after a kill: Adafactor with its slots, AdamW, both at once."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import orbax_t5x as ot
from tests.support import training

pytestmark = pytest.mark.slow

STEPS = 4
FIRST_STEP = 1_000_000


@pytest.fixture(scope="module")
def bundle(goldens):
    return goldens / "tf_bundle" / "t5_1_1_f32"


@pytest.fixture(scope="module")
def killed(bundle, tmp_path_factory):
    root = tmp_path_factory.mktemp("killed")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.training", str(bundle), str(root)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    return root


def run(name, state, steps):
    losses = []
    for _ in range(steps):
        state, loss = training.step(name, state)
        losses.append(loss)
    return state, losses


@pytest.mark.parametrize("name", training.OPTIMIZERS)
def test_losses_continue_bit_for_bit_after_a_kill(bundle, killed, name):
    expected, losses = run(name, training.start(name, bundle), STEPS)
    assert losses[-1] < losses[0]
    with training.manager(killed, name) as checkpoints:
        step = checkpoints.latest_step()
        done = step - FIRST_STEP
        # What was in flight at the kill is there whole or not at all.
        assert done in ((1, 2) if name == list(training.OPTIMIZERS)[-1] else (2,))
        state = checkpoints.restore(step, args=ot.args.TrainStateRestore(training.abstract(name)))
    assert int(state.step) == step
    resumed, continued = run(name, state, STEPS - done)
    assert continued == losses[done:]
    assert jax.tree.structure(resumed) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, resumed, expected)
