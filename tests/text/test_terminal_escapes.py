"""Names and paths hold what a terminal obeys: no text that reaches one does. And `--map` files that are hostile."""

import json
import traceback
from pathlib import Path

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.cli.main import main
from tests.support.bundle_writer import bundle_of

COLOUR = "\x1b[31m"
NAME = f"a{COLOUR}b\u202ec\x07d"
OBEYED = "\x1b\x07\u202e"
VALUE = np.ones(3, np.float32)


@pytest.fixture
def bundle(tmp_path) -> Path:
    directory = tmp_path / f"red{COLOUR}"
    directory.mkdir()
    return bundle_of({NAME: VALUE, "zzz": VALUE}).write(directory)


COMMANDS = {
    "inspect": ["inspect", "{bundle}"],
    "all": ["inspect", "{bundle}", "--all"],
    "plan": ["plan", "{bundle}", "--no-translate"],
    "explain": ["plan", "{bundle}", "--no-translate", "--explain", f"b{COLOUR}c"],
    "pack": ["plan", "{bundle}", "--rules", f"zz{COLOUR}"],
    "missing": ["inspect", f"nowhere{COLOUR}"],
    "item": ["inspect", "{bundle}", "--item", f"q{COLOUR}"],
    "map": ["plan", "{bundle}", "--target", "{bundle}", "--map", "{map}"],
    "convert": ["convert", "{bundle}", "{bundle}/under"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_what_commands_print_moves_no_cursor(command, bundle, tmp_path, capsys):
    rules = tmp_path / "map.json"
    rules.write_text(json.dumps([[f"x{COLOUR}y]", None]]))
    main([part.format(bundle=bundle, map=rules) for part in COMMANDS[command]])
    printed = "".join(capsys.readouterr())
    assert printed and not [char for char in OBEYED if char in printed]


TARGETS = {
    "missing": {f"q{COLOUR}": VALUE, f"{NAME}2": VALUE},
    "shape": {NAME: np.ones(9, np.float32), "zzz": VALUE},
    "leftover": {"zzz": VALUE},
}


@pytest.mark.parametrize("case", TARGETS)
def test_tracebacks_of_problems_move_no_cursor(case, bundle):
    with pytest.raises(ot.RestorePlanError) as caught:
        ot.plan_restore(bundle, TARGETS[case])
    text = "".join(traceback.format_exception_only(caught.value))
    assert not [char for char in OBEYED if char in text]
    assert any(NAME[:2] in (problem.leaf or problem.message) for problem in caught.value.problems)


def test_a_path_is_shown_plain_and_kept_as_it_is(bundle):
    with pytest.raises(ot.errors.CheckpointNotFoundError) as caught:
        ot.open_checkpoint(bundle.parent / "nothing")
    assert COLOUR not in str(caught.value) and COLOUR in (caught.value.path or "")


MAPS = {
    "deep": "[" * 100_000,
    "a large count": '[["a{99999999999}", "b"]]',
    "nested groups": json.dumps([["(" * 2000 + ")" * 2000, "b"]]),
    "a number of 5,000 digits": "[[" + "9" * 5000 + "]]",
    "cut": '[["a", "b"',
    "another kind": '{"a": "b"}',
}


@pytest.mark.parametrize("case", MAPS)
def test_map_files_that_make_no_sense_are_a_usage_error_in_one_line(case, bundle, tmp_path, capsys):
    rules = tmp_path / "map.json"
    rules.write_text(MAPS[case])
    assert main(["plan", str(bundle), "--target", str(bundle), "--map", str(rules)]) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and str(rules) in printed and len(printed) < 1000
