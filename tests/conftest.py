"""The test process is strict: eight CPU devices, warnings are errors, JAX promotes neither dtypes nor ranks, a hang
prints its stacks."""

import os
import shutil
import sys
import tempfile

from tests.support.xla import jaxlib_version, xla_flags

# Before JAX is imported anywhere: the device count is read once. Processes that tests start inherit all of it.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {xla_flags(8)}"
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
# What one process has compiled, those beside it and those that tests start load: of this run, and of no other.
# Before 0.10 jaxlib complains on stderr about each function that it loads.
_SHARES = "PYTEST_XDIST_WORKER" not in os.environ and jaxlib_version() >= (0, 10)
_COMPILED = tempfile.mkdtemp(prefix="compiled-") if _SHARES else None
if _COMPILED is not None:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _COMPILED
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import collections
import gc
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import jax
import pytest

from orbax_t5x.files.paths import Descriptor, Root
from orbax_t5x.restoring.plan import ExecutedPlans
from orbax_t5x.text import progress_bar

GOLDENS = Path(__file__).parent / "goldens"

# Every run of the tests draws the same examples, so that it judges the change and not its luck; `make fuzz` looks for
# new ones. Times on shared machines say nothing: no deadline, and slow generation is no failure.
_EXACT = hypothesis.settings(
    hypothesis.settings.get_profile("default"),
    deadline=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile("repo", _EXACT, derandomize=True, database=None)
hypothesis.settings.register_profile("fuzz", _EXACT, derandomize=False, max_examples=1000)
hypothesis.settings.register_profile("fast", _EXACT, derandomize=True, database=None, max_examples=20)
hypothesis.settings.load_profile("repo")

_STARTS_OF_PROCESSES = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"})

# TensorBoard imports it, too.
_WITH_TENSORFLOW = frozenset(
    {
        *(f"tests/readers/tf_bundle/test_{name}.py" for name in ("proto", "tensorflow_oracle")),
        *(f"tests/integrations/test_t5x_{name}.py" for name in ("dataset", "job", "retention")),
    }
)

# Suites are for packages without such a marker, too.
_SLOW_IN_SUITES = frozenset({"test_digests_are_the_same_in_every_process"})


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="the first case of each test that is not marked `slow`")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("fast"):
        hypothesis.settings.load_profile("fast")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives each file to one process, and all files that import TensorFlow, which takes five seconds, to the same."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "TensorFlow" if file in _WITH_TENSORFLOW else file

    return Scheduling(config, log)


def pytest_unconfigure() -> None:
    if _COMPILED is not None:
        shutil.rmtree(_COMPILED, ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Files that take long come first: one that begins last is waited for by all processes but its own.
    cases = collections.Counter(item.path for item in items)
    slow = collections.Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: (-slow[item.path], -cases[item.path]))
    if not config.getoption("fast"):
        return
    quick = [item for item in items if not item.get_closest_marker("slow") and item.name not in _SLOW_IN_SUITES]
    kept = set({item.nodeid.partition("[")[0]: item for item in reversed(quick)}.values())
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


@pytest.fixture(scope="session", autouse=True)
def _fast_tests_start_no_process(request: pytest.FixtureRequest) -> Iterator[None]:
    running = request.config.getoption("fast")

    def refuse(event: str, arguments: object) -> None:
        if running and event in _STARTS_OF_PROCESSES:
            pytest.skip("starts a process")

    if running:
        sys.addaudithook(refuse)
    yield
    running = False


@pytest.fixture(scope="session", autouse=True)
def _no_line_of_progress_for_slow_machines() -> Iterator[None]:
    """What takes a second on a busy machine prints what it prints on an idle one."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_LEAST_LINE_INTERVAL_SECS", "_MOST_LINE_INTERVAL_SECS"):
            patch.setattr(progress_bar, name, math.inf)
        yield


@pytest.fixture(autouse=True)
def _no_plan_was_executed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that knows nothing of its state records no rules only where the process executed no plan with rules."""
    monkeypatch.setattr(ExecutedPlans, "states", [])


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(("JAX_", "XLA_", "ORBAX_"))}


_GIVEN = _environment()


def pytest_collection() -> None:
    # Modules and tests come to be, and none goes: a quarter of the time would go into looking for garbage among them.
    gc.disable()


def pytest_collection_finish() -> None:
    # All tests, and the processes that they start, would run with what one module set when it was imported.
    if changed := _environment().items() ^ _GIVEN.items():
        raise pytest.UsageError(f"a module of the tests changes the environment: {sorted(dict(changed))}")
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _modules_start_light() -> None:
    """What modules before left, compiled functions above all, is searched by no collection of garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def standard_dtype_promotion() -> Iterator[None]:
    """For steps of Optax's optimizers, which raise floats to the power of integer counts."""
    with jax.numpy_dtype_promotion("standard"):
        yield


class Descriptors(set[int]):
    """The descriptors that the package has open of what it opens in checkpoints."""

    def all_closed(self) -> bool:
        """Whether all are closed, as soon as they are: a pool's thread lets go of its last job a moment later."""
        guard = time.monotonic() + 30
        while self and time.monotonic() < guard:
            gc.collect()
            time.sleep(0.001)
        return not self


@pytest.fixture
def descriptors(monkeypatch) -> Descriptors:
    """The descriptors that the package has open of what it opens in checkpoints during the test, and no others."""
    held = Descriptors()
    open_file, close_file = Root.open, Descriptor.close

    def watched(root, name, **how):
        file, found = open_file(root, name, **how)
        held.add(file.number)
        return file, found

    def close(file):
        # Before it is closed: its number may be given out again at once. One that is not held belongs to a file set of
        # an earlier test, which is collected only now.
        held.discard(file.number)
        close_file(file)

    monkeypatch.setattr(Root, "open", watched)
    monkeypatch.setattr(Descriptor, "close", close)
    return held


@pytest.fixture(scope="session")
def goldens() -> Path:
    return GOLDENS
