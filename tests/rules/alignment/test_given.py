"""One answer of a user settles the leaves of all layers; a wrong one is refused."""

import re
import shlex

import numpy as np
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.cli.main import main
from orbax_t5x.trees.flat import unflatten
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


BODY = {"norm/scale": (9,), "query/kernel": (2, 3), "head/kernel": (3, 9)}
# For each: leaves of both sides that nothing tells apart, and how many answers settle them.
ASKED = {
    "one candidate each": ({"red/kernel": (4, 5), "green": (5, 7)}, {"x/kernel": (4, 5), "y": (5, 7)}, 2),
    "a space": ({"dark green/a": (6, 7)}, {"g/d": (6, 7)}, 1),
    "a name that no option can have": ({"red=a/kernel": (4, 5)}, {"x/kernel": (4, 5)}, 1),
}


@pytest.mark.parametrize("asked", ASKED)
def test_the_answers_that_auto_prints_settle_all(asked, tmp_path, capsys, monkeypatch):
    """In Python and on the command line, as they are printed."""
    *sides, count = ASKED[asked]
    trees = [{name: np.float32(leaf) for name, leaf in tree({**BODY, **side}).items()} for side in sides]
    files = [str(tmp_path / f"{side}.safetensors") for side in ("source", "target")]
    for file, leaves in zip(files, trees, strict=True):
        safetensors.numpy.save_file(leaves, file)
    with pytest.raises(ot.errors.RestorePlanError) as caught:
        ot.plan_restore(files[0], unflatten(trees[1]), "auto")
    (problem,) = caught.value.problems
    (code,) = re.findall(r"pass transforms=(ot.rules.align\(.*?\).transforms)", str(problem.fix))
    found = eval(code, {"ot": ot, "source": trees[0], "target": trees[1]})
    assert len(ot.plan_restore(files[0], unflatten(trees[1]), found).entries) == len(trees[1])
    assert len(problem.fix.arguments["transforms"].given) == count

    monkeypatch.setenv("COLUMNS", "1000")
    command = ["plan", files[0], "--target", files[1], "--rules", "auto"]
    assert main(command) == 1
    printed = capsys.readouterr().err
    options = re.findall(r"pass (--given .*)", printed)
    if not options:
        assert f"If so, pass transforms={code}" in printed
        return
    assert "ot.rules" not in printed.split("Fix:")[1] and main([*command, *shlex.split(*options)]) == 0
    assert "as given: " in capsys.readouterr().out
