"""The test process is strict: eight CPU devices, warnings are errors, a hang prints its stacks."""

import os

# Before JAX is imported anywhere: the device count is read once.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

from pathlib import Path

import hypothesis
import pytest

GOLDENS = Path(__file__).parent / "goldens"

# Times on shared machines say nothing; the number of examples is what a test chooses. The gate runs the same examples
# each time, so that it judges the change and not its luck; every other run looks for new ones.
hypothesis.settings.register_profile("repo", deadline=None, print_blob=True, derandomize=bool(os.environ.get("CI")))
hypothesis.settings.load_profile("repo")


@pytest.fixture(scope="session")
def goldens() -> Path:
    return GOLDENS
