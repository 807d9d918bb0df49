"""The public names, and what importing the package costs."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import orbax_t5x as ot

# Written out once more, so that a name is neither added nor lost by accident.
PUBLIC = set(
    """
    STANDARD_LOGICAL_AXIS_RULES Checkpoint Format LazyArray LazyAwaitableArray LazyThreadPoolArray Limits Mark
    Migrations PlanEntry Problem RestorePlan RestorePlanError Source TrainStateHandler TypeHandlerRegistration adafactor
    args broadcast_to checkpoint_importer concatenate convert diff errors latest_step nnx open_checkpoint optimizers
    plan_restore register_format register_type_handlers repeat restore restore_or_initialize rules stack state_utils
    train_state transforms v1 verify with_shardings
    """.split()
)


def imported_for_type_checkers(package: ModuleType) -> dict[str, str]:
    """What the block under TYPE_CHECKING imports: name -> the module that has it, "" for a module of the package."""
    assert package.__file__
    body = ast.parse(Path(package.__file__).read_text()).body
    (block,) = [node for node in body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    found = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            # Otherwise type checkers take the name for private.
            assert alias.asname == alias.name
            found[alias.name] = "" if node.module == package.__name__ else str(node.module)
    return found


def test_public_names():
    assert set(ot.__all__) == PUBLIC
    assert len(ot.__all__) == len(PUBLIC)
    for name in PUBLIC:
        assert getattr(ot, name) is not None
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        _ = ot.nothing_of_this_name


def test_type_checkers_see_the_same_names_from_the_same_modules():
    for package in (ot, ot.transforms, ot.rules):
        assert imported_for_type_checkers(package) == package.MODULE_OF
        assert set(package.__all__) == package.MODULE_OF.keys()
        for name, module in package.MODULE_OF.items():
            assert not module or getattr(package, name) is getattr(importlib.import_module(module), name)


def test_dir_shows_public_names_alone():
    for name in PUBLIC:  # loading a name makes its modules attributes of the package
        getattr(ot, name)
    assert set(dir(ot)) == PUBLIC | {"__version__", "__doc__", "__name__", "__file__", "__all__"}


def test_functions_are_not_hidden_by_modules():
    assert callable(ot.restore) and callable(ot.convert)


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=800).stdout


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


def test_restoring_in_one_process_needs_no_orbax_and_loads_what_it_uses(goldens):
    """Importing Orbax takes half a second, this package as a whole a third of one: a restore does not wait for it."""
    code = f"""
import sys
import orbax_t5x as ot
prefix = {str(goldens / "tf_bundle" / "t5_1_1_f32")!r}
assert ot.restore(prefix, None)
print(*sys.modules)
"""
    loaded = run_python(code).split()
    assert {name.split(".")[0] for name in loaded} & {"tensorflow", "orbax", "optax", "flax"} == set()
    ours = {name.removeprefix("orbax_t5x.") for name in loaded if name.startswith("orbax_t5x.")}
    assert "readers.tf_bundle.open" in ours
    others = {"safetensors", "flax_msgpack", "torch_zip", "npz", "gguf", "orbax", "t5x"}
    assert ours & {f"readers.{name}.open" for name in others} == set(), "readers of other formats"
    assert {name for name in ours if name.startswith(("rules.", "restoring.diagnose", "mesh_tf"))} == set()
    steps = {f"transforms.{name}" for name in ("names", "arrays", "sizes", "layers", "translate", "follow_optimizer")}
    assert ours & steps == set(), "transforms that were not given"
    assert len(ours) < 205
