"""What `plan` and `convert` make of names: rule packs, files of rules, targets; and that proposed options work."""

import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.cli.fixes import fix_text
from orbax_t5x.cli.main import main
from orbax_t5x.errors import Fix
from tests.support import t5_layouts

GOLDENS = Path(__file__).parents[1] / "goldens"
HUGGING_FACE = GOLDENS / "safetensors" / "t5_1_1"
BUNDLE = GOLDENS / "tf_bundle" / "t5_1_1_f32"


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs a command in this process: exit code, standard output, standard error in one line."""
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments):
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, " ".join(captured.err.split())

    return run


def arrays_of(path):
    with ot.open_checkpoint(path) as checkpoint:
        return {name: view.get() for name, view in checkpoint.leaves.items()}


def assert_equals(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--rules", "auto"], "--rules auto needs --target"),
        (["--rules", "auto", "--rules", "hf_t5_to_t5x", "--target", "x"], "give no other --rules"),
        (["--rules", "auto", "--translate", "--target", "x"], "and no --translate"),
        (["--rules", "nothing"], "no such pack"),
        (["--map", "rules.json"], "rules.json: No such file"),
    ],
)
def test_contradictions_are_told_before_anything_is_opened(run, arguments, told):
    for command in (["plan", "nowhere"], ["convert", "nowhere", "out"]):
        code, out, err = run(*command, *arguments)
        assert code == 2 and not out and told in err


def test_a_tilde_in_an_option_is_the_home_directory(run, tmp_path, monkeypatch):
    """A shell leaves it as it is behind `=`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "taken").mkdir()
    code, _, err = run("convert", HUGGING_FACE, tmp_path / "out", "--format", "safetensors", "--config=~/config.json")
    assert code == 0, err
    assert (tmp_path / "out" / "config.json").read_text() == "{}"
    code, _, err = run("demo", "--keep=~/taken")
    assert code == 2 and "--keep ~/taken: File exists" in err


def test_config_is_an_object_for_safetensors(run, tmp_path):
    (tmp_path / "list.json").write_text("[1]")
    command = ["convert", HUGGING_FACE, tmp_path / "out"]
    code, _, err = run(*command, "--config", tmp_path / "list.json")
    assert code == 2 and "--config is for --format safetensors" in err
    for path, told in (
        (tmp_path / "list.json", "must be a JSON object, not a list"),
        (tmp_path / "no", "No such file"),
    ):
        code, _, err = run(*command, "--format", "safetensors", "--config", path)
        assert code == 2 and told in err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_hugging_face_to_t5x_and_back_is_one_command_each(run, tmp_path):
    code, out, err = run("convert", HUGGING_FACE, tmp_path / "t5x", "--rules", "hf_t5_to_t5x")
    assert code == 0 and not err and "mapped by rules.hf_t5_to_t5x()" in out
    expected = ot.restore(HUGGING_FACE, None, ot.rules.hf_t5_to_t5x())
    assert_equals(arrays_of(tmp_path / "t5x"), ot.state_utils.flatten_state_dict(expected))
    command = ["convert", tmp_path / "t5x", tmp_path / "hf", "--format", "safetensors", "--rules", "t5x_to_hf_t5"]
    code, out, err = run(*command, "--config", HUGGING_FACE / "config.json")
    assert code == 0 and not err and "config.json" not in out
    assert (tmp_path / "hf" / "config.json").read_bytes() == (HUGGING_FACE / "config.json").read_bytes()
    theirs = {}
    for file in HUGGING_FACE.glob("*.safetensors"):
        theirs |= safetensors.numpy.load_file(file)
    assert_equals(safetensors.numpy.load_file(tmp_path / "hf" / "model.safetensors"), theirs)


@pytest.mark.slow
def test_names_of_hugging_face_are_told(run, tmp_path):
    code, out, _ = run("convert", HUGGING_FACE, tmp_path / "orbax")
    assert code == 0 and "--rules hf_t5_to_t5x makes them T5X's" in out
    run("convert", HUGGING_FACE, tmp_path / "t5x", "--rules", "hf_t5_to_t5x")
    code, out, _ = run("convert", tmp_path / "t5x", tmp_path / "as_t5x", "--format", "safetensors")
    assert code == 0 and "--rules t5x_to_hf_t5 makes them those that from_pretrained reads" in out
    code, out, _ = run("convert", HUGGING_FACE, tmp_path / "files", "--format", "safetensors", "--dtype", "bfloat16")
    assert code == 0 and "also needs a config.json: --from or --config" in out
    assert {array.dtype for array in arrays_of(tmp_path / "files").values()} == {np.dtype(ml_dtypes.bfloat16)}


@pytest.mark.slow
def test_auto_finds_the_pack_for_a_target(run, tmp_path):
    chain = [ot.transforms.Translate(), ot.rules.t5_minimal_to_scanned(4, 4)]
    model = [*chain, ot.transforms.Keep(["target/.*"])]
    ot.convert(BUNDLE, tmp_path / "scanned", model)
    arguments = ["--target", tmp_path / "scanned", "--rules", "auto", "--no-strict"]
    code, out, err = run("plan", BUNDLE, *arguments)
    assert code == 0 and "stack of 2 on axis 1" in out, err
    code, out, err = run("convert", BUNDLE, tmp_path / "out", *arguments)
    assert code == 0 and "rules.mesh_tf_to_t5x(), rules.t5_minimal_to_scanned(num_heads=4, head_dim=4)" in out, err
    assert_equals(arrays_of(tmp_path / "out"), arrays_of(tmp_path / "scanned"))


@pytest.mark.slow
def test_auto_shows_the_rules_for_other_names_and_converts_by_them(run, tmp_path):
    words = {"decoder": "dec", "encoder": "enc", "attention": "attn"}
    source = {name: np.ascontiguousarray(value) for name, value in t5_layouts.minimal().items()}
    target = {
        f"{'/'.join(words.get(part, part) for part in name.split('/'))}/value": np.zeros_like(value)
        for name, value in source.items()
    }
    files = tmp_path / "source.safetensors", tmp_path / "target.safetensors"
    for file, arrays in zip(files, (source, target), strict=True):
        safetensors.numpy.save_file(arrays, file)
    code, out, _ = run("plan", files[0], "--target", files[1], "--rules", "auto")
    assert code == 0
    shown, _, reasons = out.partition('Rules that "auto" found, as transforms to paste:\n')[2].partition("\n\n")
    lines = shown.splitlines()
    assert "by its name after a renaming: dec/** (59), enc/** (29)" in reasons
    rules = eval(f"[{''.join(lines)}]", {"ot": ot})
    assert all(isinstance(rule, ot.transforms.Rename) for rule in rules) and len(rules) <= 4
    restored = ot.restore(files[0], {name: value for name, value in target.items()}, rules)
    code, out, err = run("convert", files[0], tmp_path / "out", "--target", files[1], "--rules", "auto")
    assert code == 0 and "mapped by " in out, err
    assert_equals(arrays_of(tmp_path / "out"), restored)
    code, _, err = run("plan", files[0], "--target", files[1])
    assert code == 1 and "--rules auto" in err and len(err.replace(str(tmp_path), "")) < 400


@pytest.mark.slow
def test_auto_that_finds_nothing_is_a_problem(run, tmp_path):
    safetensors.numpy.save_file({"x": np.ones(3, np.float32)}, tmp_path / "x.safetensors")
    for command in (["plan", HUGGING_FACE], ["convert", HUGGING_FACE, tmp_path / "out"]):
        code, out, err = run(*command, "--rules", "auto", "--target", tmp_path / "x.safetensors")
        assert code == 1 and not out and "no rule pack leads from hugging face" in err
    code, out, _ = run("plan", HUGGING_FACE, "--rules", "auto", "--target", tmp_path / "x.safetensors", "--json")
    assert code == 1 and [problem["kind"] for problem in json.loads(out)["problems"]] == ["rule"]


@pytest.mark.slow
def test_packs_follow_one_another(run, tmp_path):
    packs = ["--rules", "hf_t5_to_t5x", "--rules", "t5_minimal_to_unscanned:6,8"]
    code, _, err = run("convert", HUGGING_FACE, tmp_path / "out", *packs)
    assert code == 0, err
    chain = [ot.rules.hf_t5_to_t5x(), ot.rules.t5_minimal_to_unscanned(6, 8)]
    ot.convert(HUGGING_FACE, tmp_path / "expected", chain)
    assert_equals(arrays_of(tmp_path / "out"), arrays_of(tmp_path / "expected"))


@pytest.mark.slow
def test_a_bundle_is_not_translated_twice(run, tmp_path):
    assert run("convert", BUNDLE, tmp_path / "a")[0] == 0
    code, out, _ = run("convert", BUNDLE, tmp_path / "b", "--rules", "mesh_tf_to_t5x", "--json")
    assert code == 0 and json.loads(out)["rules"] == ["rules.mesh_tf_to_t5x()"]
    assert_equals(arrays_of(tmp_path / "b"), arrays_of(tmp_path / "a"))


def test_wrong_answers_are_options_in_the_error(run, tmp_path):
    files = tmp_path / "source.safetensors", tmp_path / "target.safetensors"
    for file, names in zip(files, (("given=a", "b"), ("x", "y")), strict=True):
        safetensors.numpy.save_file({name: np.ones((4, 5), np.float32) for name in names}, file)
    command = "plan", files[0], "--target", files[1], "--rules", "auto"
    code, _, err = run(*command, "--given", "b=z")
    assert code == 2 and "--given b=z: the target has no parameter 'z'" in err
    code, _, err = run(*command, "--given", "b=x", "--given", "given==x")
    assert code == 2 and "the source has no parameter 'given'" in err


def test_convert_fills_a_target_by_the_rules_of_a_file(run, tmp_path):
    source = {f"layers_{i}/kernel": np.full((2, 3), i, np.float32) for i in range(3)} | {
        "extra": np.ones(1, np.float32)
    }
    target = {f"blocks/{i}/w": np.zeros((2, 3), ml_dtypes.bfloat16) for i in range(3)}
    safetensors.numpy.save_file(source, tmp_path / "source.safetensors")
    safetensors.numpy.save_file(target, tmp_path / "target.safetensors")
    (tmp_path / "map.json").write_text(json.dumps([[r"blocks/(\d)/w", r"layers_\1/kernel"]]))
    command = [
        "convert",
        tmp_path / "source.safetensors",
        tmp_path / "out",
        "--target",
        tmp_path / "target.safetensors",
    ]
    command += ["--map", tmp_path / "map.json", "--format", "safetensors"]
    code, _, err = run(*command)
    assert code == 1 and "pass --no-strict" in err and "--allow-lossy-cast" in err and not (tmp_path / "out").exists()
    code, _, err = run(*command, "--no-strict", "--allow-lossy-cast")
    assert code == 0, err
    expected = {f"blocks/{i}/w": np.full((2, 3), i, ml_dtypes.bfloat16) for i in range(3)}
    assert_equals(safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors"), expected)
    command[2] = tmp_path / "item"
    code, _, err = run(*command[:7], "--no-strict", "--allow-lossy-cast", "--json")
    assert code == 0, err
    # As an Orbax item names are nested.
    assert_equals(arrays_of(tmp_path / "item"), expected)


@pytest.mark.parametrize(
    ("chain", "options"),
    [
        ([ot.rules.hf_t5_to_t5x()], "pass --rules hf_t5_to_t5x"),
        (
            [ot.transforms.Translate(), ot.rules.t5_minimal_to_scanned(num_heads=4, head_dim=4)],
            "pass --translate and pass --rules t5_minimal_to_scanned:num_heads=4,head_dim=4",
        ),
        ([ot.rules.t5x_decoder_to_maxtext(1, 2, scanned=False).inverse()],
         "pass --rules t5x_decoder_to_maxtext:num_heads=1,head_dim=2,scanned=false:inverse"),
        ([ot.transforms.AssignmentMap([("(.*)", r"target/\1")])], r'give the rule ["(.*)", "target/\\1"] by --map'),
        ([ot.transforms.AssignmentMap([("a", None), ("b", "c")])], 'give the rules ["a", null], ["b", "c"] by --map'),
        ([ot.transforms.Rename([("a", "b")])], "in Python, add transforms=[ot.transforms.Rename([('a', 'b')])]"),
    ],
)  # fmt: skip
def test_transforms_as_options(chain, options):
    fix = Fix.adding(*chain)
    assert fix_text(fix) == options
    assert eval(fix.text.removeprefix("add transforms="), {"ot": ot}) == chain


def options_in(err, directory):
    """What an error says to pass, as arguments."""
    fix = re.search(r"Fix: (.*?)(?: - \[|$)", err)[1]
    arguments = re.findall(r"pass (--\S+)(?: ([^-\s]\S*))?", fix)
    rules = re.findall(r"the rule (\[.*?\]) by --map", fix)
    if rules:
        (directory / "fix.json").write_text(f"[{', '.join(rules)}]")
        arguments.append(("--map", str(directory / "fix.json")))
    assert arguments, fix
    return [part for pair in arguments for part in pair if part]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "target_chain"),
    [
        (HUGGING_FACE, [ot.rules.hf_t5_to_t5x()]),
        (HUGGING_FACE, [ot.rules.hf_t5_to_t5x(), ot.rules.t5_minimal_to_scanned(6, 8)]),
        (HUGGING_FACE, [ot.transforms.Rename([("(.*)", r"model/\1")])]),
    ],
)
def test_proposed_options_work_when_they_are_passed(run, tmp_path, source, target_chain):
    ot.convert(source, tmp_path / "target", target_chain)
    code, _, err = run("plan", source, "--target", tmp_path / "target")
    assert code == 1 and "in Python" not in err, err
    code, _, err = run("plan", source, "--target", tmp_path / "target", *options_in(err, tmp_path))
    assert code == 0, err
