"""The report of a verification."""

import json

import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.cli.main import main
from tests.support.saving import save


def statuses(report):
    return {leaf.name: leaf.status for leaf in report.leaves}


def run(capsys, *arguments):
    code = main(["verify", *map(str, arguments)])
    return code, capsys.readouterr().out


@pytest.mark.parametrize("others", [{}, {"w": np.ones(3, np.float32)}])
def test_a_leaf_without_elements_is_nothing_that_was_compared(tmp_path, capsys, others):
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"empty": np.zeros((0, 4), np.float32), **others}, path)
    report = ot.verify(path)
    assert statuses(report) == {"empty": "ok"} | dict.fromkeys(others, "no checksum")
    assert report.status == "no checksum"
    assert run(capsys, path)[0] == 3
    code, out = run(capsys, path, "--json")
    assert code == 3 and json.loads(out)["status"] == "no checksum"


def test_a_leaf_without_elements_beside_one_that_was_compared(tmp_path, capsys):
    item = {"a": np.ones(9), "empty": np.zeros((0, 2))}
    with ocp.Checkpointer(ot.TrainStateHandler()) as checkpointer:
        checkpointer.save(tmp_path / "item", args=ot.args.TrainStateSave(item, on_unsupported="skip"))
    assert statuses(ot.verify(tmp_path / "item")) == {"a": "ok", "empty": "ok"}
    assert run(capsys, tmp_path / "item")[0] == 0


def test_layers_are_one_line(tmp_path):
    path = save(tmp_path / "item", {f"layers_{number}": np.ones(9) for number in range(4)})
    assert "layers_{0…3} ×4" in str(ot.verify(path))
