"""`diff`: exit codes, JSON, names and items on the command line."""

import json

import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

import orbax_t5x as ot
from tests.conftest import GOLDENS
from tests.support.compared import TREE, changed
from tests.support.saving import save


@pytest.mark.slow
def test_exit_codes_and_json(tmp_path, run):
    other = changed()
    other["params"]["layers_1"]["kernel"][0, 0] += 0.25
    a, b = save(tmp_path / "a", TREE), save(tmp_path / "b", other)
    assert run("diff", a, a)[0] == 0
    code, out, _ = run("diff", a, b)
    assert code == 1 and "params/layers_1/kernel" in out and "5 leaves equal" in out
    assert run("diff", a, b, "--values", "no")[0] == run("diff", a, b, "--atol", "0.25")[0] == 0
    assert run("diff", a, b, "--rtol", "1e-9")[0] == 1
    code, out, _ = run("diff", a, b, "--json", "--memory-limit", "2M")
    told = json.loads(out)
    assert code == 1 and told["equal"] is False
    assert [leaf["status"] for leaf in told["leaves"]].count("values") == 1


@pytest.mark.slow
def test_names_on_the_command_line(tmp_path, run):
    bundle = GOLDENS / "tf_bundle" / "t5_1_1_f32"
    ot.convert(bundle, tmp_path / "t5x", ot.transforms.Translate())
    assert run("diff", bundle, tmp_path / "t5x")[0] == 0  # a bundle's names are translated by themselves
    assert run("diff", bundle, bundle)[0] == 0  # and are not where the other side is a bundle, too
    assert run("diff", bundle, tmp_path / "t5x", "--no-translate")[0] == 1
    hf = GOLDENS / "safetensors" / "t5_1_1"
    ot.convert(hf, tmp_path / "from_hf", ot.rules.hf_t5_to_t5x())
    assert run("diff", hf, tmp_path / "from_hf", "--rules", "auto")[0] == 0
    assert run("diff", hf, tmp_path / "from_hf", "--rules", "hf_t5_to_t5x")[0] == 0
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    safetensors.numpy.save_file({"a": np.ones(3, np.float32)}, tmp_path / "old" / "model.safetensors")
    safetensors.numpy.save_file({"b": np.ones(3, np.float32)}, tmp_path / "new" / "model.safetensors")
    (tmp_path / "rules.json").write_text('[["b", "a"]]')
    assert run("diff", tmp_path / "old", tmp_path / "new", "--map", tmp_path / "rules.json")[0] == 0


def test_items_on_the_command_line(tmp_path, run):
    handlers = {"one": ot.TrainStateHandler(), "two": ot.TrainStateHandler()}
    with ocp.CheckpointManager(tmp_path / "run", item_handlers=handlers) as manager:
        tree = ot.args.TrainStateSave({"w": np.ones(2)})
        manager.save(1, args=ocp.args.Composite(one=tree, two=ot.args.TrainStateSave({"w": np.zeros(2)})))
    root = tmp_path / "run"
    assert run("diff", root, root)[0] == run("diff", root, root, "--item", "one")[0] == 0
    assert run("diff", root, root, "--item", "one", "--item-b", "two")[0] == 1
    code, _, err = run("diff", root, root, "--item", "three")
    assert code == 1 and "three" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a"], "usage"),
        (["a", "b", "--values", "maybe"], "invalid choice"),
        (["a", "b", "--atol", "-1"], "no tolerance"),
        (["a", "b", "--rtol", "few"], "no tolerance"),
        (["a", "b", "--memory-limit", "many"], "no size"),
        (["a", "b", "--rules", "auto", "--translate"], "--rules auto"),
        (["a", "b", "--rules", "hf_t5_to_t5"], "did you mean 'hf_t5_to_t5x'?"),
        (["a", "b", "--map", "nowhere.json"], "nowhere.json"),
    ],
)
def test_wrong_usage_is_2(run, arguments, said):
    code, out, err = run("diff", *arguments)
    assert code == 2 and not out and said in err


def test_a_terminal_is_not_moved_by_names(tmp_path, run):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    safetensors.numpy.save_file({"\x1b[2Ja": np.ones(3, np.float32)}, tmp_path / "one" / "model.safetensors")
    safetensors.numpy.save_file({"b": np.ones(3, np.float32)}, tmp_path / "two" / "model.safetensors")
    code, out, _ = run("diff", tmp_path / "one", tmp_path / "two")
    assert code == 1 and "\x1b" not in out


def test_leaves_of_one_side_and_some_names(tmp_path, run):
    """A model beside a checkpoint with its optimizer."""
    model = {"params/w": np.ones(3, np.float32), "params/v": np.zeros(2, np.float32)}
    safetensors.numpy.save_file(model, tmp_path / "a.safetensors")
    safetensors.numpy.save_file({**model, "opt/mu": np.ones(3, np.float32)}, tmp_path / "b.safetensors")
    both = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    code, out, _ = run("diff", *both)
    assert code == 1 and "only in b" in out
    code, out, _ = run("diff", *both, "--no-strict")
    assert code == 0 and "1 leaf only in b" in out and "2 leaves equal" in out
    code, out, _ = run("diff", *both, "--only", "params/.*")
    assert code == 0 and "opt/mu" not in out and "2 leaves equal" in out
    assert run("diff", *both, "--only", "params/w", "--only", "opt/.*")[0] == 1
    assert run("diff", *both, "--only", "opt/.*", "--no-strict")[0] == 1  # nothing was compared
    code, _, error = run("diff", *both, "--only", "(")
    assert code == 1 and "no regular expression" in error
