"""Commands in this process, on a wide terminal, and a checkpoint of alike layers."""

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from orbax_t5x.cli.main import main


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture
def run(capsys):
    """Runs a command in this process: exit code, standard output, standard error."""

    def run(*arguments):
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def layers(tmp_path):
    """A safetensors checkpoint of three alike layers, and one leaf for each dtype that matters."""
    arrays = {
        f"layers_{i}/{name}/kernel": np.full((4, 8), i, np.float32) for i in range(3) for name in ("wi_0", "wi_1")
    }
    arrays |= {"step": np.array(7, np.int64), "scale": np.ones(4, ml_dtypes.bfloat16)}
    path = tmp_path / "layers.safetensors"
    safetensors.numpy.save_file(arrays, path)
    return path
