"""Single rules of a list of transforms: named sources and migrations are lists of their own."""

import functools

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.provenance.steps import steps_of, without_skipped
from orbax_t5x.restoring.sources import FoundRules, OneSource
from tests.support.recorded_chains import entries_of

T = ot.transforms
A, B, C, D = (T.Rename([(name, name * 2)]) for name in "abcd")
CHAIN = (OneSource("one", (A, B)), C, *ot.Migrations([("first", [A]), ("second", [B, D])]).since("first").steps)


def test_sources_and_migrations_are_flattened():
    steps = steps_of(CHAIN, found=[C])
    assert [step.transform for step in steps] == [A, B, C, A, B, D]
    assert [step.source for step in steps] == ["one", "one", "", "", "", ""]
    assert [step.name for step in steps] == ["", "", "", "first", "second", "second"]
    assert [step.is_found for step in steps] == [False, False, True, False, False, False]
    assert [step.is_assumed for step in steps] == [False, False, False, True, False, False]
    assert [step.entry.get("auto") for step in steps] == [None, None, True, None, None, None]


def test_skipped_rules_are_left_out():
    chain, skipped = without_skipped(CHAIN, {0, 2, 4})
    assert skipped == (1,)
    assert [getattr(part, "steps", None) for part in chain] == [(B,), None, (A,), (D,)]
    unchanged, skipped = without_skipped(CHAIN, ())
    assert skipped == () and all(part is before for part, before in zip(unchanged, CHAIN, strict=True))


def test_auto_is_a_placeholder_until_rules_are_found():
    (step,) = steps_of([FoundRules()])
    assert step.is_placeholder and step.entry["auto"] is True and not step.only_selects
    assert steps_of([T.Keep("a")])[0].only_selects


@pytest.mark.parametrize(
    ("transform", "patterns"),
    [
        (A, ["Rename: a"]),
        (T.Drop(["a", "b"]), ["Drop: a", "Drop: b"]),
        (T.StackLayers(r"layers_(\d+)/(.*)", r"layers/\2", 0), [r"StackLayers: layers_(\d+)/(.*)"]),
        (T.FollowOptimizer(A), ["Rename: a"]),
        (T.Chain([A, T.Chain([T.Cast("x", "float32")])]), ["Rename: a", "Cast: x"]),
        (functools.partial(print, assignment_map=[("a", "b")]), ["builtins.print: a"]),
        (T.Merge({"a": np.zeros(2)}), None),
        (T.Intersect(), None),
    ],
)
def test_entries_have_the_patterns_of_their_rules(transform, patterns):
    (entry,) = entries_of([transform])
    assert entry.get("patterns") == patterns


def test_long_rules_are_cut_in_the_record():
    (entry,) = entries_of([T.Drop(["x" * 400])])
    assert len(entry["text"]) == 301 and entry["text"].endswith("…")
