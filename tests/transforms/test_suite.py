"""The shared suite over every transform, against oracles written independently."""

import re
from typing import ClassVar

import ml_dtypes
import numpy as np

from orbax_t5x import transforms as tr
from orbax_t5x.testing.transform_suite import Case, TransformSuite
from tests.support import transform_oracle as oracle
from tests.support.transform_cases import AB, ADAPTED, FOLLOWED, LAYERS, MERGED, QUANTIZED, STACK, STACKED, TWO


def rules_case(transform, other, source, expected, target=None):
    return Case(lambda: transform, lambda: other, source, expected, target or {})


class TestSuite(TransformSuite):
    """The shared suite."""

    cases: ClassVar = {
        "assignment_map": Case(
            lambda: tr.AssignmentMap([("a", "b"), (re.compile("b"), "a"), ("n/(.)", r"\1"), ("x", None)]),
            lambda: tr.AssignmentMap([("a", "b"), (re.compile("b"), "a"), ("n/(.)", r"\1"), ("x", None)], False),
            {**AB, "x": AB["a"]},
            oracle.assignment_map(
                {**AB, "x": AB["a"]},
                dict.fromkeys(("a", "b", "n/b", "x")),
                [("a", "b"), ("b", "a"), ("n/(.)", r"\1"), ("x", None)],
            ),
            dict.fromkeys(("a", "b", "n/b", "x")),
        ),
        "intersect": Case(
            tr.Intersect, lambda: tr.Drop("a"), AB, oracle.intersect(AB, {"a": 0, "q": 0}), {"a": 0, "q": 0}
        ),
        "merge": Case(lambda: tr.Merge(MERGED), lambda: tr.Merge({**MERGED, "more": 1}), AB, oracle.merge(AB, MERGED)),
        "merge_overwrite": Case(
            lambda: tr.Merge({"n": MERGED["n"].copy(), "a": MERGED["a"].copy()}, overwrite=True),
            lambda: tr.Merge({"n": MERGED["n"][:1]}, overwrite=True),
            AB,
            oracle.merge(AB, MERGED, overwrite=True),
        ),
        "rename": Case(
            lambda: tr.Rename([("a", "b"), ("b", "d/a"), ("(c)", None)]),
            lambda: tr.Rename([("a", "b"), ("b", "d/a")]),
            AB,
            oracle.rename(AB, [("a", "b"), ("b", "d/a"), ("(c)", None)]),
        ),
        "drop": Case(lambda: tr.Drop(["a", "[c]"]), lambda: tr.Drop("a"), AB, oracle.drop(AB, ["a", "[c]"])),
        "keep": Case(lambda: tr.Keep(["a", "[c]"]), lambda: tr.Keep("a"), AB, oracle.keep(AB, ["a", "[c]"])),
        "repeat_layers": Case(
            lambda: tr.RepeatLayers(r"(enc|dec)/layers_(?P<i>\d+)/(.*)", 5),
            lambda: tr.RepeatLayers(r"(enc|dec)/layers_(?P<i>\d+)/(.*)", 5, "append"),
            LAYERS,
            oracle.repeat_layers(LAYERS, r"(enc|dec)/layers_(?P<i>\d+)/(.*)", 5),
        ),
        "repeat_stacked_layers": Case(
            lambda: tr.RepeatLayers("enc/layers/w", 3, [3, 0, 0], axis=-2),
            lambda: tr.RepeatLayers("enc/layers/w", 3, [3, 0, 1], axis=-2),
            STACKED,
            {**STACKED, "enc/layers/w": STACKED["enc/layers/w"][:, [3, 0, 0]]},
        ),
        "stack_layers": Case(
            lambda: tr.StackLayers(*STACK),
            lambda: tr.StackLayers(*STACK[:2], 0),
            LAYERS,
            oracle.stack_layers(LAYERS, *STACK),
        ),
        "unstack_layers": Case(
            lambda: tr.UnstackLayers(r"(.*)/layers/(.*)", r"\1/layers_{i}/\2", 1),
            lambda: tr.UnstackLayers(r"(.*)/layers/(.*)", r"\1/layers_{i:02d}/\2", 1),
            STACKED,
            oracle.unstack_layers(STACKED, r"(.*)/layers/(.*)", r"\1/layers_{i}/\2", 1),
        ),
        "split": Case(
            lambda: tr.Split(r"(.*)/w", [r"\1/q", r"\1/k"], 1, [1, 2]),
            lambda: tr.Split(r"(.*)/w", [r"\1/q", r"\1/k"], 1, [2, 1]),
            {name: value for name, value in TWO.items() if name != "z/w"},
            oracle.split({n: v for n, v in TWO.items() if n != "z/w"}, r"(.*)/w", [r"\1/q", r"\1/k"], 1, [1, 2]),
        ),
        "concat": Case(
            lambda: tr.Concat(["(x)/w", "(y)/w"], "w", -1),
            lambda: tr.Concat(["(y)/w", "(x)/w"], "w", -1),
            TWO,
            oracle.concat(TWO, ["(x)/w", "(y)/w"], "w", -1),
        ),
        "reshape": Case(
            lambda: tr.Reshape("[xy]/w", (3, -1)),
            lambda: tr.Reshape("[xy]/w", (-1,)),
            TWO,
            oracle.each(TWO, "[xy]/w", lambda value: value.reshape(3, -1)),
        ),
        "transpose": Case(
            lambda: tr.Transpose("./w"), lambda: tr.Transpose("./w", (1, 0)), TWO, oracle.each(TWO, "./w", np.transpose)
        ),
        "cast": Case(
            lambda: tr.Cast(".*", "bfloat16"),
            lambda: tr.Cast(".*", np.float16),
            TWO,
            oracle.each(TWO, ".*", lambda value: value.astype(ml_dtypes.bfloat16)),
        ),
        "repeat": Case(
            lambda: tr.Repeat("./w", 3, -1),
            lambda: tr.Repeat("./w", 2, -1),
            TWO,
            oracle.each(TWO, "./w", lambda value: np.repeat(np.expand_dims(value, -1), 3, -1)),
        ),
        "pad": Case(
            lambda: tr.Pad("[xy]/w", (None, 5), 2.5),
            lambda: tr.Pad("[xy]/w", (None, 5)),
            TWO,
            oracle.each(TWO, "[xy]/w", lambda value: oracle.padded(value, (None, 5), 2.5)),
        ),
        "pad_everywhere": Case(
            lambda: tr.Pad("./w", [4, 6]),
            lambda: tr.Pad("./w", [4, 6], tr.FALLBACK),
            {"x/w": TWO["x/w"]},
            oracle.each({"x/w": TWO["x/w"]}, "./w", lambda value: oracle.padded(value, (4, 6), 0)),
        ),
        "slice": Case(
            lambda: tr.Slice("[xy]/w", np.s_[:1, ..., None, ::-2]),
            lambda: tr.Slice("[xy]/w", np.s_[:1, ..., None, ::-1]),
            TWO,
            oracle.each(TWO, "[xy]/w", lambda value: value[:1, ..., None, ::-2]),
        ),
        "slice_of_rows": Case(
            lambda: tr.Slice("[xy]/w", slice(1, None)),
            lambda: tr.Slice("[xy]/w", 1),
            TWO,
            oracle.each(TWO, "[xy]/w", lambda value: value[1:]),
        ),
        "add_low_rank": Case(
            lambda: tr.AddLowRank("(.)/kernel", r"\1/a", r"\1/b", 0.5),
            lambda: tr.AddLowRank("(.)/kernel", r"\1/a", r"\1/b", 0.25),
            ADAPTED,
            oracle.add_low_rank(ADAPTED, "(.)/kernel", r"\1/a", r"\1/b", 0.5),
        ),
        "dequantize": Case(
            lambda: tr.Dequantize("(.)/kernel", r"\1/scale"),
            lambda: tr.Dequantize("(x)/kernel", r"\1/scale"),
            QUANTIZED,
            {
                "x/kernel": QUANTIZED["x/kernel"].astype(np.float32) * np.float32(0.3),
                **{name: QUANTIZED[name] for name in ("y/kernel", "n")},
            },
        ),
        "average": Case(
            lambda: tr.Average({"x": 1, "y": 3}),
            lambda: tr.Average({"x": 1, "y": 2}),
            TWO,
            oracle.average(TWO, {"x": 1, "y": 3}),
        ),
        "overlay": Case(
            lambda: tr.Overlay(("z", "x", "y")),
            lambda: tr.Overlay(("x", "z", "y")),
            TWO,
            oracle.overlay(TWO, ("z", "x", "y")),
        ),
        "chain": Case(
            lambda: tr.Chain([tr.Drop("c"), tr.Rename([("a", "z")])]),
            lambda: tr.Chain([tr.Rename([("a", "z")]), tr.Drop("c")]),
            AB,
            {"z": AB["a"], "b": AB["b"]},
        ),
        "follow_optimizer": Case(
            lambda: tr.FollowOptimizer(tr.Chain([tr.Rename([("target/a", "target/n")]), tr.Transpose("target/n")])),
            lambda: tr.FollowOptimizer(tr.Rename([("target/a", "target/n")])),
            FOLLOWED,
            {
                "target/n": FOLLOWED["target/a"].T,
                "target/b": FOLLOWED["target/b"],
                "state/param_states/0/mu/n": FOLLOWED["state/param_states/0/mu/a"].T,
                "state/param_states/0/mu/b": FOLLOWED["state/param_states/0/mu/b"],
                "state/param_states/1/n": None,
                "state/step": FOLLOWED["state/step"],
            },
        ),
    }
