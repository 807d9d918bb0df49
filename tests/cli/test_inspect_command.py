"""`inspect`: what a checkpoint holds."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.cli import inspect_command

BUNDLE = Path(inspect_command.__file__).parent / "demo_data" / "model.ckpt-1000000"


def test_inspect_tells_the_tree(run, layers):
    code, out, err = run("inspect", layers)
    assert code == 0 and not err
    assert out.splitlines() == [
        f"{layers}: safetensors",
        "",
        "layers_{0…2}/                   768 B",
        "  wi_0/kernel  float32[4,8] ×3  384 B",
        "  wi_1/kernel  float32[4,8] ×3  384 B",
        "scale          bfloat16[4]        8 B",
        "step           int64[]            8 B",
        "",
        "8 leaves, 197 elements, 784 B",
        "  float32: 6 leaves, 768 B",
        "  bfloat16: 1 leaf, 8 B",
        "  int64: 1 leaf, 8 B",
    ]


def test_inspect_all_has_a_line_for_each_leaf(run, layers):
    _, out, _ = run("inspect", "--all", layers)
    assert out.count("kernel") == 6 and "…" not in out


def test_inspect_json_is_everything(run, layers):
    code, out, _ = run("inspect", "--json", layers)
    said = json.loads(out)
    with ot.open_checkpoint(layers) as checkpoint:
        assert code == 0 and said["format"] == "safetensors" and said["total_bytes"] == 784
        assert [leaf["name"] for leaf in said["leaves"]] == list(checkpoint.leaves)
        assert {leaf["name"]: (tuple(leaf["shape"]), leaf["dtype"], leaf["nbytes"]) for leaf in said["leaves"]} == {
            name: (view.shape, view.dtype.name, view.nbytes) for name, view in checkpoint.leaves.items()
        }


def test_inspect_the_demo_bundle(run):
    code, out, _ = run("inspect", BUNDLE)
    assert code == 0
    assert "tf_bundle, step 1000000" in out and "143 leaves, 18,913 elements, 73.9 KiB" in out
    (line,) = [line for line in out.splitlines() if line.split()[:1] == ["embedding"]]
    assert line.split() == ["embedding", "float32[128,16]", "8.00", "KiB"]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_inspect_fits_the_terminal(run, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    _, out, _ = run("inspect", BUNDLE)
    assert all(len(line) <= width for line in out.splitlines()[1:])


def test_inspect_shows_empty_nodes(tmp_path, run):
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "item", {"a": np.ones(2, np.float32), "none": None, "empty": {}})
    code, out, _ = run("inspect", tmp_path / "item")
    assert code == 0 and "None" in out and "a " in out


def test_a_leaf_that_is_also_a_branch_is_shown_as_both(tmp_path, run):
    path = tmp_path / "both.safetensors"
    safetensors.numpy.save_file(
        {"a": np.zeros(2, np.float32), "a/b": np.zeros(3, np.float32), "a/c": np.zeros(1)}, path
    )
    _, out, _ = run("inspect", path)
    names = [line.split()[0] for line in out.splitlines()[2:6]]
    assert names == ["a", "a/", "b", "c"]


@pytest.mark.slow
def test_inspect_waits_for_no_jax():
    code = (
        "import sys; from orbax_t5x.cli.main import main; "
        f"assert main(['inspect', {str(BUNDLE)!r}]) == 0; "
        "sys.exit(bool({'jax', 'flax', 'orbax', 'tensorflow'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, timeout=800).returncode == 0
