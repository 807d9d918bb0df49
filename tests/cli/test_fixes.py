"""Fixes are rendered from their data: other words for all messages change no option and no keyword."""

import dataclasses
import json
import pickle
import re
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.cli.fixes import fix_text
from orbax_t5x.cli.main import main
from orbax_t5x.errors import CheckpointError, Fix, Problem, RestorePlanError
from orbax_t5x.operations.start.advice import with_init_fn

BUNDLE = Path(__file__).parents[1] / "goldens" / "tf_bundle" / "t5_1_1_f32"

# For each constructor of a fix: one, and what the command line makes of its data.
FIXES = {
    "setting": (Fix.setting("pass {} to leave them unread", strict=False), "--no-strict"),
    "adding": (Fix.adding(ot.rules.t5_minimal_to_unscanned(6, 8)), "--rules t5_minimal_to_unscanned:num_heads=6,"),
    "writing": (Fix.writing("a", "b"), '["a", "b"]'),
    "removing": (Fix.removing(ot.transforms.Translate(), "there"), "--no-translate"),
    "in_program": (Fix.in_program("call it"), "in Python, "),
    "by_target": (Fix.by_target("build another model"), "choose another --target"),
    "any_of": (Fix.any_of(Fix.setting("give {} values", fallback=...), Fix.setting("{}", item="a")), "--item a"),
}  # fmt: skip


def reworded(fix):
    """The same data in other words."""
    return dataclasses.replace(
        fix,
        text="lorem ipsum",
        words="dolor {} sit" if fix.words else "",
        alternatives=tuple(map(reworded, fix.alternatives)),
    )


def test_every_constructor_is_here():
    assert {name for name, member in vars(Fix).items() if isinstance(member, classmethod)} == FIXES.keys()


@pytest.mark.parametrize("name", FIXES)
def test_options_come_from_the_data(name):
    fix, option = FIXES[name]
    assert option in fix_text(fix) and option in fix_text(reworded(fix))
    data, other = fix.as_data(), reworded(fix).as_data()
    assert all(other[key] == data[key] for key in ("transforms", "arguments"))
    assert pickle.loads(pickle.dumps(fix)) == fix and hash(fix) == hash(pickle.loads(pickle.dumps(fix)))


def test_what_the_command_line_lacks_stays_python():
    """No option makes a call strict, or permits rules that match nothing."""
    assert fix_text(Fix.setting("pass {} to be sure", strict=True)) == "in Python, pass strict=True to be sure"
    rules = [("a", "b")]
    assert fix_text(Fix.adding(ot.transforms.AssignmentMap(rules))) == 'give the rule ["a", "b"] by --map'
    lenient = fix_text(Fix.adding(ot.transforms.AssignmentMap(rules, require_all_rules_match=False)))
    assert lenient.startswith("in Python, add transforms=[ot.transforms.AssignmentMap(")


@pytest.mark.parametrize("fallback", [Fix.setting("give {} values", fallback=...), FIXES["any_of"][0]])
def test_a_start_names_its_own_keyword(fallback):
    problem = Problem("missing", "a", "lorem ipsum", reworded(fallback))
    (found,) = with_init_fn(RestorePlanError([problem])).problems
    assert "init_fn=" in str(found.fix) and "fallback" not in str(found.fix)
    assert found.fix is not None and dict(found.fix.arguments) == {"init_fn": ...}


def test_problems_of_a_plan_give_options_whatever_the_words_are():
    with pytest.raises(RestorePlanError) as caught:
        ot.plan_restore(BUNDLE, {"target": {"token_embedder": {"embedding": np.zeros(3, np.float16)}, "x": 0.0}})
    problems = [one for one in caught.value.problems if one.fix is not None]
    reworded_problems = [dataclasses.replace(one, message="x", fix=reworded(one.fix)) for one in problems]
    text = RestorePlanError(reworded_problems).described(fix_text, width=200)
    assert "pass --translate" in text and "--no-strict" in text and "strict=" not in text


# -- every text of this package is another one


def in_other_words(fix):
    """The same data in other words, with the text that is made from both."""
    if fix is None or fix.alternatives:
        return fix and Fix.any_of(*map(in_other_words, fix.alternatives))
    has_data = fix.transforms or fix.arguments or fix.rule or fix.removed is not None
    if not has_data:
        return dataclasses.replace(fix, text="lorem ipsum")
    return dataclasses.replace(fix, words="dolor {} sit")._written()


@pytest.fixture
def reword(monkeypatch):
    """Makes every problem and every error have other texts, from now on."""

    def reword():
        problem, error = Problem.__init__, CheckpointError.__init__

        def make_problem(self, kind, leaf, message, fix=None, *data, **more):
            problem(self, kind, leaf, "amet", in_other_words(fix), *data, **more)

        def make_error(self, message, *, fix=None, **where):
            error(self, message if isinstance(self, RestorePlanError) else "amet", fix=in_other_words(fix), **where)

        monkeypatch.setattr(Problem, "__init__", make_problem)
        monkeypatch.setattr(CheckpointError, "__init__", make_error)

    return reword


@pytest.fixture
def files(tmp_path):
    """Writes checkpoints and a file of rules; a name in capitals stands for its path in the commands below."""
    ones = {name: np.ones((4, 2), np.float32) for name in ("a", "b")}
    contents = {
        "AB": ones,
        "A": {"a": ones["a"]},
        "LARGER": {"a": np.ones((6, 2), np.float32)},
        "HALF": {"a": np.ones((4, 2), np.float16)},
        "WIDE": {"a": np.ones((4, 2), np.float64)},
        "OTHER": {"a": ones["a"], "kernel": np.ones((3, 5), np.float32)},
        "RENAMED": {"a": ones["a"], "kernels": np.ones((3, 5), np.float32)},
        "PREFIXED": {f"model/{name}": value for name, value in ones.items()},
        "T5X": {"target/token_embedder/embedding": np.ones((128, 16), np.float32)},
    }
    paths = {name: tmp_path / f"{name}.safetensors" for name in contents}
    for name, arrays in contents.items():
        safetensors.numpy.save_file(arrays, paths[name])
    (tmp_path / "empty").mkdir()
    rules = {"UNUSED": [["x", "a"]], "NO_SUCH": [["a", "akernels"]]}
    paths |= {name: tmp_path / f"{name}.json" for name in rules}
    for name, table in rules.items():
        paths[name].write_text(json.dumps(table))
    return {name: str(path) for name, path in paths.items()} | {
        "BUNDLE": str(BUNDLE),
        "NEW": str(tmp_path / "new"),
        "EMPTY": str(tmp_path / "empty"),
    }


# A command that fails, and the options that its fixes are.
COMMANDS = {
    "plan AB --target A": {"--no-strict"},
    "plan A --target AB": {"--target"},
    "plan A --target LARGER": {"--target"},
    "plan LARGER --target A": {"--target"},
    "plan A --target HALF": {"--allow-lossy-cast"},
    "plan WIDE --target A": {"--allow-lossy-cast"},
    "plan RENAMED --target OTHER": {"--target", "--no-strict"},
    "plan PREFIXED --target AB": {"--map"},
    "plan A --target A --map UNUSED": set(),
    "plan RENAMED --target A --map NO_SUCH": {"--no-strict"},
    "plan BUNDLE --no-translate --target T5X": {"--translate", "--target", "--no-strict"},
    "plan T5X --translate": {"--no-translate"},
    "plan A --rules t5_minimal_to_scanned:num_heads=1,head_dim=1": {"--rules"},
    "plan A --target AB --rules auto": set(),
    "plan A --item x": {"--item"},
    "convert A A": set(),
    "convert A EMPTY": {"--overwrite"},
    "convert AB NEW --target A": {"--no-strict"},
}  # fmt: skip
_OPTION = re.compile(r"--(?:rules|resuming|on-unsupported) [^\s,]+|--[a-z-]+")
_RULE = re.compile(r'\["[^]]*\]')


@pytest.mark.parametrize("command", COMMANDS)
def test_options_are_the_same_in_other_words(command, files, reword, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    arguments = [files.get(word, word) for word in command.split()]

    def failed(*more):
        assert main([*arguments, *more]) == 1
        printed = capsys.readouterr()
        fixes = [line for line in printed.err.splitlines() if line.strip().startswith("Fix")]
        data = json.loads(printed.out)["problems"] if more and command.startswith("plan") and printed.out else []
        return _OPTION.findall("".join(fixes)), _RULE.findall("".join(fixes)), data

    plain, plain_json = failed(), failed("--json")
    reword()
    other, other_json = failed(), failed("--json")
    assert other[:2] == plain[:2] and {option.split()[0] for option in plain[0]} == COMMANDS[command]
    for one, another in zip(plain_json[2], other_json[2], strict=True):
        assert another["message"] == "amet" and {**data_of(another["fix"])} == data_of(one["fix"])
        assert options_of(another["fix"]) == options_of(one["fix"])


def data_of(fix):
    return {} if fix is None else {key: fix.get(key) for key in ("transforms", "arguments", "rule")}


def options_of(fix):
    return [] if fix is None else _OPTION.findall(fix["text"])


def starts_from(source, root, target):
    with ocp.CheckpointManager(root) as manager:
        return ot.restore_or_initialize(manager, target, init_from=source)


WAYS = {
    "restore": (lambda source, root, target: ot.restore(source, target), "fallback=", "init_fn="),
    "v1": (lambda source, root, target: ot.v1.load_and_transform(source, target), "fallback=", "init_fn="),
    "start": (starts_from, "init_fn=", "fallback="),
}


@pytest.mark.parametrize("way", WAYS)
def test_keywords_are_those_of_the_call_in_other_words(way, files, reword, tmp_path):
    restore, wanted, unwanted = WAYS[way]
    target = {name: np.zeros((6, 2), np.float32) for name in ("a", "b", "c")}
    found = []
    for _ in range(2):
        with pytest.raises(RestorePlanError) as caught:
            restore(files["AB"], tmp_path / "root", target)
        text = str(caught.value)
        assert wanted in text and unwanted not in text
        found.append([data_of(None if one.fix is None else one.fix.as_data()) for one in caught.value.problems])
        reword()
    assert found[0] == found[1]
    assert "amet" in text and "checkpoint has" not in text
