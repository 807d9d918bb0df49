"""Several sources of one model are combined by nothing: the proposal combines them, whatever their names begin with."""

import itertools
import re

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.trees.flat import flatten, unflatten
from tests.support.failed_plans import BUNDLE, applied, problems_of
from tests.support.memory_checkpoint import checkpoint

T = ot.transforms
MODEL = {
    f"{tower}/layers_{layer}/mlp/{name}/kernel": np.full((3, 5), layer, np.float32)
    for tower in ("encoder", "decoder")
    for layer in range(3)
    for name in ("wi", "wo")
}
PREFIXES = ("", "target/", "params/", "model/params/")


def below(prefix, leaves=MODEL):
    return {f"{prefix}{name}": value for name, value in leaves.items()}


def combined(problem):
    """The sources' own transforms and the ways to combine the sources, from the text of advice."""
    assert not problem.fix.transforms and not problem.fix.arguments
    sources, _, ways = str(problem.fix).rpartition("combine the sources: ")
    own = sources.removeprefix("give the source its transforms: ").removesuffix(", and ")
    names = {"ot": ot, "path": None}
    return eval(own or "{}", names), [
        eval(way, names) for way in re.findall(r"\[ot\.transforms\.(?:[^]]|\](?=\)))*\]", ways)
    ]


@pytest.mark.parametrize("names", [("one", "two"), ("first", "second", "third")])
def test_the_average_of_sources_with_prefixes_of_their_own(names):
    for prefixes in itertools.product(PREFIXES[: 5 - len(names)], repeat=len(names) + 1):
        *stored, wanted = prefixes
        sources = {name: checkpoint(below(prefix)) for name, prefix in zip(names, stored, strict=True)}
        (problem,) = problems_of(sources, unflatten(below(wanted)))
        own, (transforms, overlay) = combined(problem)
        assert overlay == [T.Overlay(names)]
        given = {name: ot.Source(sources[name], source.transforms) for name, source in own.items()}
        assert set(own) == {name for name, prefix in zip(names, stored, strict=True) if prefix != wanted}
        assert transforms == [T.Average(dict.fromkeys(names, 1))]
        plan = ot.plan_restore({**sources, **given}, unflatten(below(wanted)), transforms)
        assert not plan.unused and {entry.action for entry in plan.entries} == {"read"}


@pytest.mark.parametrize("first", ["encoder", ""])
def test_sources_with_different_leaves_are_overlaid(first):
    part = {name: value + 1 for name, value in MODEL.items() if name.startswith(first or "decoder/layers_0")}
    rest = {name: value for name, value in MODEL.items() if not first or name not in part}
    sources = {"rest": checkpoint(rest), "part": checkpoint(part)}
    (problem,) = problems_of(sources, unflatten(MODEL))
    # Which of two leaves is wanted is not seen from their names.
    transforms = applied(problem.fix) if first else combined(problem)[1][0]
    restored = flatten(ot.restore(sources, unflatten(MODEL), transforms))
    for name, value in restored.items():
        np.testing.assert_array_equal(value, part.get(name, MODEL[name]))


def test_a_bundle_and_steps_of_a_run():
    keep = T.Keep(["target/.*"])
    model = ot.restore(BUNDLE, None, [T.Translate(), keep])
    sources = {"first": ot.Source(BUNDLE, [T.Translate(), keep]), "one": checkpoint(flatten(model))}
    (problem,) = problems_of(sources, model)
    ways = [[T.Average({"first": 1, "one": 1})], [T.Overlay(["first", "one"])]]
    assert combined(problem) == ({}, ways)
    (problem,) = problems_of({**sources, "first": BUNDLE}, model)
    own, found = combined(problem)
    assert own["first"].transforms[0] == T.Translate() and found == ways


def test_a_target_by_sources_is_not_combined():
    target = unflatten({f"{source}/{name}": MODEL[name] for source in ("one", "two") for name in MODEL})
    del target["one"]["encoder"]["layers_0"]
    target["one"]["encoder"]["layers_9"] = {"mlp": {"wi": {"kernel": np.zeros((3, 5), np.float32)}}}
    sources = {"one": checkpoint(MODEL), "two": checkpoint(MODEL)}
    assert not any(
        "Average" in str(problem.fix) or "Overlay" in str(problem.fix) for problem in problems_of(sources, target)
    )
