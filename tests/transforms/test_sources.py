"""`Average` and `Overlay` of several sources."""

import jax
import ml_dtypes
import numpy as np

from orbax_t5x import transforms as tr
from orbax_t5x.lazy import ValueLeaf, as_view
from orbax_t5x.testing.transform_suite import assert_same, run
from tests.support.transform_cases import TWO, problems


def test_average_reads_each_source_once_and_says_what_it_rounds():
    source = {
        "x/f": np.float32([1, 2]),
        "y/f": np.float32([3, 5]),
        "x/n": np.int32(10),
        "y/n": np.int32(13),
        "x/flag": np.array([True]),
        "y/flag": np.array([True]),
        "x/only": np.float32(1),
        "q": np.float32(7),
    }
    result, diagnostics = run(tr.Average([0.5, 0.5], pattern=r"(./)?(f|n|flag)"), source)
    assert_same(
        result,
        {
            "f": np.float32([2, 3.5]),
            "n": np.int32(12),
            "flag": np.array([True]),
            "x/only": source["x/only"],
            "q": source["q"],
        },
    )
    assert len(diagnostics.warnings) == 1 and "'n'" in diagnostics.warnings[0] and "rounded" in diagnostics.warnings[0]
    assert [(p.kind, p.leaf) for p in problems(tr.Average([1, 1]), source)] == [("missing", "only")]


def test_averages_of_integers_stay_in_their_range_or_are_problems():
    for dtype in (np.int8, np.uint16, ml_dtypes.int4, ml_dtypes.uint2):
        source = {"x/n": np.array([1, 0], dtype), "y/n": np.array([0, 1], dtype)}
        (problem,) = problems(tr.Average({"x": 2, "y": -1}), source)
        assert (problem.kind, problem.leaf) == ("dtype", "n") and np.dtype(dtype).name in problem.message
        assert problems(tr.Average({"x": -2, "y": 1}), source)
        _, diagnostics = run(tr.Average({"x": 2, "y": 1}), source)
        assert "rounded" in diagnostics.warnings[0] and not diagnostics.problems
        # Weights are divided by their sum: two negative ones are two positive ones.
        assert not problems(tr.Average({"x": -2, "y": -1}), source)
    floats = {"x/f": np.float32([1, 0]), "y/f": np.float32([0, 1])}
    assert_same(run(tr.Average({"x": 2, "y": -1}), floats)[0], {"f": np.float32([2, -1])})


def test_prng_keys_have_no_average():
    class Key(ValueLeaf):
        prng_impl = "threefry2x32"

    source = {f"{name}/key": as_view(Key(np.uint32([1, 2]), "key")) for name in "xy"}
    (problem,) = problems(tr.Average([1, 1]), source)
    assert (problem.kind, problem.leaf) == ("dtype", "key")
    typed = {f"{name}/key": jax.random.key(1) for name in "xy"}
    assert {problem.leaf for problem in problems(tr.Average([1, 1]), typed)} == {"x/key", "y/key"}


def test_average_weights_by_name_or_in_order():
    by_name, _ = run(tr.Average({"y": 3, "x": 1}, pattern="./[wb]"), TWO)
    in_order, _ = run(tr.Average((1, 3), pattern="./[wb]"), {n: v for n, v in TWO.items() if n != "z/w"})
    assert_same({n: by_name[n] for n in "wb"}, in_order)
    assert problems(tr.Average((1, 3)), TWO)[0].kind == "rule"
    assert problems(tr.Average({"x": 1, "nope": 3}), TWO)[0].kind == "missing"


def test_overlay_prefers_the_first_source():
    result, _ = run(tr.Overlay(("y", "x")), TWO)
    assert_same(result, {"w": TWO["y/w"], "b": TWO["y/b"], "z/w": TWO["z/w"]})
    assert problems(tr.Overlay(("y", "nope")), TWO)[0].kind == "missing"
