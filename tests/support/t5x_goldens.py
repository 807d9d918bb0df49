"""The native T5X checkpoints of `goldens/t5x_native`, unpacked, with what T5X says they hold."""

from __future__ import annotations

import atexit
import functools
import gzip
import json
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

_GOLDENS = Path(__file__).parents[1] / "goldens" / "t5x_native"
# The first releases of Python 3.11 have no filters.
_SAFELY = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}

NATIVE = (
    *("d1_adafactor", "d1_adamw", "d1_multi", "d1_mutables", "d1_inference_params_only"),
    *("d8_bf16", "d8_adafactor_sds_smallchunks"),
)
VARIANTS = ("gfile_driver", "gcs_driver", "old_tensorstore_spec", "v2_uint16", "version1")


class Golden(NamedTuple):
    """One checkpoint.

    Attributes:
      root: the directory that holds the step.
      step: the step's directory.
      values: what the leaves hold, in their true dtypes.
      empties: names of leaves that are None or empty.
    """

    root: Path
    step: Path
    values: dict[str, np.ndarray]
    empties: dict[str, dict[str, bool]]


@functools.cache
def _unpacking_directory() -> Path:
    directory = tempfile.mkdtemp(prefix="t5x_goldens")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)


@functools.cache
def golden(name: str) -> Golden:
    """A checkpoint by name; unpacked once per process, to be read and never changed."""
    with tarfile.open(_GOLDENS / f"{name}.tar.gz") as archive:
        archive.extractall(_unpacking_directory(), **_SAFELY)
    root = _unpacking_directory() / name
    said = json.loads((root / "expected_meta.json").read_text())["leaves"]
    with np.load(root / "expected.npz") as values:
        arrays = {
            leaf: values[leaf].astype(getattr(ml_dtypes, about["dtype"], about["dtype"]))
            for leaf, about in said.items()
            if "dtype" in about
        }
    (step,) = root.glob("checkpoint_*")
    return Golden(root, step, arrays, {leaf: about for leaf, about in said.items() if "dtype" not in about})


@functools.cache
def single_file() -> Path:
    """The single-file checkpoint of T5X's public test data."""
    path = _unpacking_directory() / "test_t5_tiny.checkpoint_0"
    path.write_bytes(gzip.decompress((_GOLDENS / f"{path.name}.gz").read_bytes()))
    return path
