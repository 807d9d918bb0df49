"""One answer of a user settles the leaves of all layers; a wrong one is refused."""

import re

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.rules.finding import find_rules
from tests.support.aligned_leaves import wrong_leaves


def tree(shapes):
    return {name: np.random.default_rng(at).normal(size=shape) for at, (name, shape) in enumerate(shapes.items())}


QUESTIONS = (
    {
        f"h/{i}/{name}/{kind}": shape
        for i in range(3)
        for name in ("a", "c")
        for kind, shape in (("kernel", (4, 5)), ("bias", (5,)))
    },
    {
        f"layers_{i}/{name}/{kind}": shape
        for i in range(3)
        for name in ("x", "y")
        for kind, shape in (("w", (4, 5)), ("b", (5,)))
    },
)


@pytest.mark.parametrize("given", [{"h/1/a/kernel": "layers_1/y/w"}, {"h/{}/a/bias": "layers_{}/y/b"}])
def test_one_answer_settles_its_kind_its_module_and_the_last_of_the_others(given):
    source, target = map(tree, QUESTIONS)
    assert ot.rules.align(source, target).open.keys() == target.keys()
    alignment = ot.rules.align(source, target, given=given)
    assert alignment.is_complete
    truth = {
        name.replace("h/", "layers_")
        .replace("/a/", "/y/")
        .replace("/c/", "/x/")
        .replace("kernel", "w")
        .replace("bias", "b"): value
        for name, value in source.items()
    }
    assert not wrong_leaves(alignment, source, truth)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"h/9/a/kernel": "layers_1/y/w"}, "no parameter 'h/9/a/kernel'"),
        ({"h/1/a/kernel": "layers_1/z/w"}, "no parameter 'layers_1/z/w'"),
        ({"h/1/a/kernel": "layers_1/y/b"}, r"shape \(4, 5\)"),
        ({"h/1/a/kernel": "layers_1/y/w", "h/1/c/kernel": "layers_1/y/w"}, "two leaves"),
        ({"h/1/a/kernel": "layers_1/y/w", "h/2/c/kernel": "layers_2/y/w"}, "as in other layers"),
        ({"h/1/a/kernel": "layers_{}/y/w"}, "stands for a layer's number"),
    ],
)
def test_wrong_answers_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        ot.rules.align(*map(tree, QUESTIONS), given=given)


def test_auto_asks_for_the_answer_that_settles_most():
    body = {"norm/scale": (9,), "query/kernel": (2, 3), "head/kernel": (3, 9)}
    source, target = ({**body, **question} for question in QUESTIONS)
    with pytest.raises(ot.errors.RestorePlanError) as caught:
        find_rules(tree(source), tree(target))
    (problem,) = caught.value.problems
    (answer,) = re.findall(r"given=(\{.*?\})\)", str(problem.fix))
    old, new = next(iter(eval(answer).items()))
    assert f"--given {old}={new}" in str(problem.fix)
    assert ot.rules.align(tree(source), tree(target), given=eval(answer)).is_complete
    assert find_rules(tree(source), tree(target), eval(answer)).is_whole
