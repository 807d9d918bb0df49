"""Prefixes of a model's parameters in a tree, and changes from one to another."""

from functools import cache

import orbax_t5x as ot
from orbax_t5x import rules
from orbax_t5x import transforms as tr
from orbax_t5x.testing.transform_suite import run
from tests.support.prefixed_models import BUNDLE, check_parameters, parameters, source, target_of

HEADS = (4, 4)


@cache
def tree(kind, layout):
    return target_of(kind, layout)


def test_translate_follows_the_prefix_by_hand():
    for kind in ("params", "variables in params", "bare", "in a tree", "nnx state in a dict"):
        target, prefix = tree(kind, "minimal")
        plan = ot.plan_restore(BUNDLE, target, tr.Translate(), fallback=target, strict=False)
        check_parameters(plan, prefix, "minimal")


def test_packs_follow_the_prefix_by_hand():
    pack = rules.t5_minimal_to_scanned(*HEADS)
    for kind in ("params", "variables in params", "bare", "in a tree", "nnx state"):
        for one, other, transform in (("minimal", "scanned", pack), ("scanned", "minimal", pack.inverse())):
            target, prefix = tree(kind, other)
            check_parameters(ot.plan_restore(source(one), target, transform, fallback=target), prefix, other)


def test_a_tree_of_several_models_keeps_its_names():
    params = {f"{name}/params/{leaf}": value for name in "ab" for leaf, value in parameters("minimal").items()}
    target = {f"params/{leaf}": value for leaf, value in parameters("scanned").items()}
    result, _ = run(rules.t5_minimal_to_scanned(*HEADS), params, target)
    assert {name.partition("/params/")[0] for name in result} == {"a", "b"}
    assert "a/params/encoder/encoder/mlp/wo/kernel" in result
