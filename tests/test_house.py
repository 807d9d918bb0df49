"""The house itself: public names, the direction of imports, and what importing the package may cost."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import orbax_t5x as ot

PACKAGE = Path(ot.__file__).parent

PUBLIC = {
    "STANDARD_LOGICAL_AXIS_RULES",
    "Checkpoint",
    "LazyArray",
    "LazyAwaitableArray",
    "LazyThreadPoolArray",
    "Limits",
    "PlanEntry",
    "Problem",
    "RestorePlan",
    "RestorePlanError",
    "TrainStateHandler",
    "adafactor",
    "args",
    "broadcast_to",
    "checkpoint_importer",
    "concatenate",
    "convert",
    "errors",
    "latest_step",
    "nnx",
    "open_checkpoint",
    "optimizers",
    "plan_restore",
    "repeat",
    "restore",
    "rules",
    "stack",
    "state_utils",
    "train_state",
    "transforms",
    "with_shardings",
}

# A room may import from its own rank and from lower ones. Modules that stand alone in the package's root are rooms,
# too.
RANKS = {
    "text": -1,  # `errors` folds its problems with it
    "errors": 0,
    "concurrency": 0,
    "trees": 0,
    "provenance": 1,
    "lazy": 1,
    "storage": 1,
    "optim": 1,
    "readers": 2,
    "mesh_tf": 3,
    "transforms": 3,
    "rules": 3,
    "state_utils": 3,
    "checkpoint_importer": 3,
    "adafactor": 3,
    "optimizers": 3,
    "train_state": 3,
    "partitioning": 3,
    "nnx": 3,
    "restoring": 4,
    "handlers": 6,
    "operations": 6,
    "cli": 7,
}
# Private modules beside T5X's own.
T5X_RANK = 3


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def imported_modules(tree: ast.AST):
    type_checking = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in type_checking:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "orbax_t5x":
                yield from (f"orbax_t5x.{alias.name}" for alias in node.names)
            else:
                yield node.module


def test_public_names():
    assert set(ot.__all__) == PUBLIC
    assert set(ot._PUBLIC) == PUBLIC
    for name in PUBLIC:
        assert getattr(ot, name) is not None
    assert set(ot.__all__) <= set(dir(ot))
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        _ = ot.nothing_of_this_name


def test_functions_are_not_hidden_by_modules():
    assert callable(ot.restore) and callable(ot.convert)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_one_way(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    room = parts[1]
    if room == "__init__":
        return
    rank = RANKS.get(room, T5X_RANK)
    for module in imported_modules(ast.parse(path.read_text())):
        if module.startswith("orbax_t5x") and room_of(module) not in ("", "__init__"):
            other = RANKS.get(room_of(module), T5X_RANK)
            assert other <= rank, f"{path} ({room}, rank {rank}) imports {module} (rank {other})"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_names_say_something(path):
    assert path.stem.strip("_") not in ("util", "utils", "common", "helper", "helpers", "type", "types", "misc")


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120).stdout


def test_import_brings_in_nothing():
    """Neither TensorFlow nor Flax, no JAX, no registration with Orbax."""
    code = """
import sys
import orbax_t5x
print(sorted({name.split('.')[0] for name in sys.modules} & {'tensorflow', 'flax', 'jax', 'orbax', 'optax',
'tensorstore'}))
"""
    assert run_python(code).strip() == "[]"


def test_import_registers_nothing_and_names_register_on_use():
    code = """
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_args import _SAVE_ARG_TO_HANDLER as table
import threading
before, started = len(table), []
start, importer = threading.Thread.start, threading.current_thread()
def watched(thread):
    if threading.current_thread() is importer:
        started.append(thread)
    start(thread)
threading.Thread.start = watched
import orbax_t5x as ot
assert len(table) == before and not started
threading.Thread.start = start
ot.TrainStateHandler
print(len(table) - before)
"""
    assert int(run_python(code)) >= 1


def test_opening_a_checkpoint_needs_neither_flax_nor_tensorflow(goldens):
    code = f"""
import sys
import orbax_t5x as ot
with ot.open_checkpoint({str(goldens / "tf_bundle" / "t5_1_1_f32")!r}) as checkpoint:
    assert checkpoint.leaves
print(sorted({{name.split('.')[0] for name in sys.modules}} & {{'tensorflow', 'flax', 'optax'}}))
"""
    assert run_python(code).strip() == "[]"
