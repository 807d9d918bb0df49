"""Some kills in jobs of several processes; `python -m tests.robustness.killed_pods` makes as many as there is time."""

import pytest
import safetensors.numpy

from tests.robustness import killed_pods
from tests.robustness.killed_pods import Kill, Outcome, is_foreseen
from tests.support.jax_job import run_alone

KILLS = [Kill(2, 1, "verify", 0.0), Kill(3, 2, "rows", 0.01), Kill(2, 1, "save", 0.05), Kill(2, 0, "plan", 0.0)]


@pytest.mark.slow
def test_survivors_end_with_a_typed_error(tmp_path):
    safetensors.numpy.save_file(killed_pods.values(), tmp_path / "model.safetensors")
    script = f"""
from pathlib import Path
from tests.robustness.killed_pods import Kill, is_foreseen, run
for number, kill in enumerate({KILLS!r}):
    found = run(kill, Path({str(tmp_path)!r}), number)
    assert len(found) == kill.count - 1 and all(is_foreseen(kill, one) for one in found.values()), (kill, found)
    print("ended", flush=True)
"""
    assert run_alone(script).count("ended") == len(KILLS)


def test_a_hang_or_an_untyped_error_would_be_noticed():
    for kill in KILLS:
        assert not is_foreseen(kill, Outcome("hang", 60.0, ""))
    assert not is_foreseen(KILLS[0], Outcome("ValueError", 1.0, "")) and is_foreseen(KILLS[0], Outcome("typed", 1, ""))
