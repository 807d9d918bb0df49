"""Chains of transforms and plain functions of T5X's protocol."""

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x import transforms as tr
from orbax_t5x.restoring.sources import chain_of
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.run import run_transforms
from tests.support.transform_cases import AB


def test_plain_functions_keep_t5x_protocol():
    calls = []

    def with_keyword(state, target, *, is_resuming=False):
        calls.append(("with", is_resuming, sorted(target)))
        return state

    def without_keyword(state, target):
        calls.append(("without", None, sorted(target)))
        state["new"] = state.pop("a")
        return state

    def everything(state, target, **keywords):
        calls.append(("any", keywords["is_resuming"], sorted(target)))
        return state

    chain = (with_keyword, without_keyword, everything)
    diagnostics = Diagnostics()
    source = dict(AB)
    result = run_transforms(chain, source, {"t/u": 0}, is_resuming=False, diagnostics=diagnostics)
    assert sorted(result) == ["b", "c", "new"] and list(source) == ["a", "b", "c"]
    assert calls == [("with", False, ["t"]), ("without", None, ["t"]), ("any", False, ["t"])]
    assert "without_keyword" in diagnostics.rule_for["new"]
    calls.clear()
    result = run_transforms(chain, source, {"t/u": 0}, is_resuming=True, diagnostics=diagnostics)
    assert result == source and calls == [("with", True, ["t"]), ("any", True, ["t"])]


def test_a_function_that_fails_or_returns_no_dict_is_a_problem():
    def fails(state, target):
        error = ValueError("no such thing")
        error.add_note("make one")
        raise error

    diagnostics = Diagnostics()
    run_transforms((fails, lambda state, target: None), AB, {}, is_resuming=False, diagnostics=diagnostics)
    assert [p.kind for p in diagnostics.problems] == ["transform", "transform"]
    assert "no such thing" in diagnostics.problems[0].message and str(diagnostics.problems[0].fix) == "make one"
    assert "NoneType" in diagnostics.problems[1].message


def test_rules_are_recorded_through_a_chain():
    diagnostics = Diagnostics()
    result = run_transforms(
        (tr.Rename([("a", "b"), ("b", "a")]), lambda s, t: {k: v for k, v in s.items() if k != "c"}, tr.Drop("a")),
        AB,
        {},
        is_resuming=False,
        diagnostics=diagnostics,
    )
    assert list(result) == ["b"] and diagnostics.rule_for["b"] == "Rename 'a' -> 'b'"


T = ot.transforms
HISTORY = ot.Migrations([("rename", [T.Rename([("a", "b")])]), ("turn", T.Transpose("b"))])


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ([("a", []), ("a", [])], ValueError),
        ([("", [])], ValueError),
        (["a"], TypeError),
        ([("a", ["auto"])], TypeError),
        ([("a", "auto")], TypeError),
        ([("a", [T.Rename])], TypeError),
    ],
)
def test_what_is_no_list_of_migrations(wrong, error):
    with pytest.raises(error):
        ot.Migrations(wrong)


def test_names_digests_and_since():
    assert HISTORY.names == ("rename", "turn")
    again = ot.Migrations([("rename", [T.Rename([("a", "b")])]), ("turn", [T.Transpose("b")])]).since("rename")
    assert again == HISTORY and [step.digest() for step in again.steps] == [step.digest() for step in HISTORY.steps]
    assert [step.is_assumed for step in again.steps] == [True, False]
    assert len({step.digest() for step in ot.Migrations([("a", []), ("b", [])]).steps}) == 2
    with pytest.raises(ValueError, match="the names are rename, turn"):
        HISTORY.since("nothing")


def test_its_place_in_a_chain(tmp_path):
    assert len(chain_of([T.Drop("z"), HISTORY])) == 3
    with pytest.raises(TypeError, match="other transforms follow"):
        chain_of([HISTORY, T.Drop("z")])
    source = ot.Source(tmp_path, HISTORY)
    np.savez(tmp_path / "x.npz", a=np.zeros(2))
    with pytest.raises(TypeError, match="Migrations are for restores"):
        ot.TrainStateHandler().save(tmp_path / "step", ot.args.TrainStateSave({"a": np.zeros(2)}, transforms=HISTORY))
    with pytest.raises((TypeError, ot.errors.CheckpointError)):
        ot.restore({"one": source}, None)
