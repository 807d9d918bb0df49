"""What is shown as code is whole, and can be pasted."""

import json

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import Fix, Problem
from orbax_t5x.text.code import Code, code_lines
from tests.support.failed_plans import problems_of
from tests.support.memory_checkpoint import checkpoint
from tests.support.small_models import empty, model, renamed

T = ot.transforms
MODEL = model()
MANY = tuple(T.Rename([(f"(.*)/it's, a ({i})/(.*)", rf"\1/new_{i}/\2"), (r'"\[\(\{', "b")]) for i in range(30))


def evaluated(code):
    return eval(code, {"ot": ot, "np": np})


@pytest.mark.parametrize("rules", [(), MANY[:1], MANY, (T.FollowOptimizer(T.Chain(MANY)), T.Drop(["a", "b"]))])
def test_transforms_are_printed_as_their_code(rules):
    code = repr(Code(rules))
    assert tuple(evaluated(code)) == rules
    assert all(len(line) <= 100 for line in code.splitlines())


def test_a_literal_is_never_broken():
    code = f"f({'x' * 120!r}, [{'y z' * 50!r}])"
    assert "\n".join(code_lines(code)).count("'") == 4
    assert {line.count("'") for line in code_lines(code)} <= {0, 2}


@pytest.mark.parametrize("count", [2, 30])
@pytest.mark.parametrize("width", [None, 80])
def test_a_long_fix_is_whole_in_an_error(count, width):
    """Of many problems, too, whose texts are cut otherwise."""
    problems = [Problem("shape", "a", "lorem " * 200, Fix.any_of(Fix.adding(*MANY[:count]), Fix("ipsum")))]
    problems += [Problem("missing", f"x{i}", f"{i}") for i in range(40)]
    text = ot.RestorePlanError(problems).described(width=width)
    assert len(text.splitlines()) < 60
    code = text[text.index("transforms=[") + len("transforms=") : text.index(", or ipsum")]
    assert tuple(evaluated(code)) == MANY[:count]


def test_the_rules_of_auto_paste_from_the_plan_and_its_attribute(capsys):
    source = checkpoint(
        {f"params/{name}": value for name, value in renamed(MODEL, attention="attn", mlp="ffn").items()}
    )
    plan = ot.plan_restore(source, empty(MODEL), "auto")
    shown = str(plan).split("to paste:")[1].split("Why ")[0]
    assert tuple(evaluated(f"[{shown}]")) == plan.found_rules == tuple(evaluated(repr(plan.found_rules)))
    json.dumps(plan.to_json())


def test_many_missing_leaves_are_one_entry():
    """The closest names differ from leaf to leaf, and numbers and words alternate."""
    target = {f"layers/{i}/cross/{one}": np.zeros((2, 2)) for i in range(20) for one in "koqv"}
    problems = problems_of(checkpoint({"a": np.zeros(3)}), target)
    text = str(ot.RestorePlanError(problems))
    assert sum(line.startswith("[missing]") for line in text.splitlines()) == 1 and len(text.splitlines()) < 15


def test_the_cause_stands_before_what_follows_from_it():
    source = checkpoint({f"params/{name}": value for name, value in MODEL.items()})
    first, *_ = problems_of(source, empty(MODEL), [T.Rename([("no/such", "x")])])
    assert first.kind == "unused_rule"
