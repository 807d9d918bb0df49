"""Saves with the library's handler, and what lies in the directory afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp

import orbax_t5x as ot

UNSUPPORTED = {
    "zero size": np.zeros((0, 3), np.float32),
    "zero size on devices": jax.numpy.zeros((2, 0)),
    "uint4": np.zeros(3, ml_dtypes.uint4),
    "uint4 on devices": jax.numpy.zeros(3, "uint4"),
    "uint2": np.zeros(3, ml_dtypes.uint2),
    "float8_e4m3": np.zeros(3, ml_dtypes.float8_e4m3),
    "float6_e2m3fn": np.zeros(3, ml_dtypes.float6_e2m3fn),
    "bytes": np.array([b"text"]),
    "unicode": np.array(["text"]),
    "objects": np.array([b"text"], object),
    "dates": np.array(["2020-01-01"], "datetime64[s]"),
    "records": np.zeros(3, [("a", "<f4")]),
    "long double": np.ones(3, np.longdouble),
    "a bytes scalar": b"text",
    "a huge integer": 2**70,
    "a numpy bool": np.bool_(True),
    "a complex number": 1j,
    "an object": object(),
    "an abstract array": jax.ShapeDtypeStruct((3,), np.float32),
}
"""Leaves that Orbax cannot store."""


def files(directory: Path) -> list[str]:
    """Lists all files and directories below a directory."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def data_files(directory: Path) -> list[str]:
    """Lists the files without the metadata of steps, which Orbax writes in the background."""
    return [name for name in files(directory) if (directory / name).is_file() and "_CHECKPOINT_METADATA" not in name]


def custom_metadata(item: Path) -> Any:
    """Reads the custom metadata of an Orbax item."""
    return json.loads((item / "_METADATA").read_text()).get("custom_metadata")


def save(
    directory: Path, state: Any, options: dict[str, Any] | None = None, kind: Any = ocp.Checkpointer, **keywords: Any
) -> Path:
    """Saves with a `TrainStateHandler(**options)`; the keywords are those of `TrainStateSave`."""
    with kind(ot.TrainStateHandler(**(options or {}))) as checkpointer:
        checkpointer.save(directory, args=ot.args.TrainStateSave(state, **keywords))
    return directory


def stock(directory: Path) -> Any:
    """Restores with stock Orbax."""
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(directory)


def assert_same(restored, expected):
    assert jax.tree.structure(restored) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(restored), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype and one.sharding == other.sharding
        np.testing.assert_array_equal(one, other)


def run(code, **environment):
    """What a script prints, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        timeout=800,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()
