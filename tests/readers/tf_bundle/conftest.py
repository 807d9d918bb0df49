"""A small bundle, and TensorFlow where it is installed."""

import importlib
import warnings
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tests.support.bundle_writer import bundle_of


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """The prefix of a bundle in a directory without a `checkpoint` file."""
    (tmp_path / "run").mkdir()
    return bundle_of({"x": np.arange(4)}).write(tmp_path / "run", "model.ckpt-5")


@pytest.fixture(scope="module")
def tf() -> ModuleType:
    with warnings.catch_warnings():
        # TensorFlow's own import of NumPy's and Python's deprecated names is not ours to mend.
        warnings.simplefilter("ignore")
        module = importlib.import_module("tensorflow")
        importlib.import_module("tensorflow.core.protobuf.tensor_bundle_pb2")
    return module
