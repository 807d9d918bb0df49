"""A restore of two leaves enters few functions, and seldom goes from file to file: people follow it when they debug."""

import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import orbax_t5x as ot
from tests.support.placed_arrays import sharded, values

PACKAGE = f"{Path(ot.__file__).parent}/"
ARRAYS = {"a": values((64, 16)), "b": {"c": values((8,))}}


def walk(function):
    """Calls a function; returns the numbers of functions and files of the package it enters, and of moves between."""
    functions: set[tuple[str, str]] = set()
    files: list[str] = []

    def profile(frame, event, argument):
        file = frame.f_code.co_filename
        # Python 3.11 counts comprehensions as functions, later versions do not.
        if event == "call" and file.startswith(PACKAGE):
            functions.add((file, frame.f_code.co_qualname))
            if not files or files[-1] != file:
                files.append(file)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return len(functions), len(set(files)), len(files)


@pytest.fixture
def unprofiled():
    """Skips where something else already profiles or traces, such as coverage by a profiler."""
    if sys.getprofile() is not None:
        pytest.skip("a profiler runs")


def assert_within(found, most):
    assert all(number <= limit for number, limit in zip(found, most, strict=True)), found


def test_a_restore_of_a_file_is_a_short_walk(tmp_path, unprofiled):
    path = tmp_path / "model.safetensors"
    save_file({"a": ARRAYS["a"], "b.c": ARRAYS["b"]["c"]}, path)
    target = {"a": sharded((64, 16), spec=P("x")), "b.c": jax.ShapeDtypeStruct((8,), np.float32)}
    ot.restore(path, target)
    assert_within(walk(lambda: ot.restore(path, target)), (244, 47, 220))


def test_a_restore_of_an_orbax_checkpoint_with_a_rule_is_a_short_walk(tmp_path, unprofiled):
    path = tmp_path / "item"
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path, ARRAYS)
    rename = ot.transforms.Rename([("a", "x")])
    target = {"x": sharded((64, 16), spec=P("x")), "b": {"c": jax.ShapeDtypeStruct((8,), np.float32)}}
    ot.restore(path, target, [rename])
    assert_within(walk(lambda: ot.restore(path, target, [rename])), (442, 73, 515))


def test_a_further_small_leaf_costs_few_calls(tmp_path, unprofiled):
    def calls(count):
        path = tmp_path / f"{count}.safetensors"
        save_file({f"l{number}": np.ones(8, np.float32) for number in range(count)}, path)
        target = {f"l{number}": jax.ShapeDtypeStruct((8,), np.float32) for number in range(count)}
        ot.restore(path, target)
        found = 0

        def profile(frame, event, argument):
            nonlocal found
            found += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

        threading.setprofile(profile)
        sys.setprofile(profile)
        try:
            ot.restore(path, target)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        return found

    assert (calls(300) - calls(100)) / 200 <= 30


LOADED = """
import subprocess
import sys
import numpy as np
import orbax_t5x as ot
ot.restore(sys.argv[1], {"a": np.zeros(8, np.float32)})
files = {module.__file__ for name, module in sys.modules.items() if name.startswith("orbax_t5x")}
print(sum(len(open(file).read().splitlines()) for file in files))
"""


@pytest.mark.slow
def test_a_restore_of_a_file_loads_few_lines(tmp_path):
    """What other formats, errors, tables and older steps need is loaded when they are met."""
    save_file({"a": np.ones(8, np.float32)}, tmp_path / "model.safetensors")
    command = [sys.executable, "-c", LOADED, str(tmp_path / "model.safetensors")]
    assert int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) <= 15_150
