"""Plans show for each leaf why `"auto"` took it."""

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.restoring.show.entries import why_text
from orbax_t5x.restoring.sources import FoundRules
from orbax_t5x.trees.flat import unflatten
from tests.support import t5_layouts
from tests.support.memory_checkpoint import checkpoint

# Names of a checkpoint and of a target; and the reason that `"auto"` has for each leaf of the target.
SHAPES = {"enc/attn/query": (4, 6), "enc/norm/scale": (4,), "head/kernel": (9, 3)}
RENAMED = {
    "enc/attn/query": "encoder/attention/q",
    "enc/norm/scale": "encoder/norm/weight",
    "head/kernel": "head/kernel",
}


def with_adam(names):
    params = {names[name]: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
    moments = {f"opt_state/0/{kind}/{name}": value for kind in ("mu", "nu") for name, value in params.items()}
    return {**{f"params/{name}": value for name, value in params.items()}, **moments, "step": np.int32(3)}


PLAIN = t5_layouts.minimal()
LISTED = {name.replace("layers_", "layers/"): value for name, value in PLAIN.items()}
REASONS = {
    "names, renamings and an optimizer": (
        with_adam(dict(zip(SHAPES, SHAPES, strict=True))),
        with_adam(RENAMED),
        (),
        {
            "params/head/kernel": ("name", ""),
            "params/encoder/attention/q": ("renaming", ""),
            "opt_state/0/mu/encoder/attention/q": ("optimizer", "exact"),
            "opt_state/0/mu/head/kernel": ("name", ""),
            "step": ("name", ""),
        },
    ),
    "structure": ({"dec/w": np.ones(2)}, {"decoder/x": np.ones(2)}, (), {"decoder/x": ("structure", "")}),
    "given": (
        {"a": np.ones((4, 5)), "b": np.ones((4, 5))},
        {"x": np.ones((4, 5)), "y": np.ones((4, 5))},
        (("a", "y"),),
        {"y": ("given", ""), "x": ("structure", "")},
    ),
    "a pack": (
        t5_layouts.hugging_face(PLAIN),
        t5_layouts.below("target/", PLAIN),
        (),
        {f"target/{name}": ("pack", "hf_t5_to_t5x()") for name in PLAIN},
    ),
    "a pack, then a renaming": (
        t5_layouts.hugging_face(PLAIN),
        LISTED,
        (),
        {
            "token_embedder/embedding": ("pack", "hf_t5_to_t5x()"),
            "encoder/layers/1/mlp/wo/kernel": ("renaming", "hf_t5_to_t5x()"),
        },
    ),
    "a renaming, then a pack": (
        LISTED,
        t5_layouts.hugging_face(PLAIN),
        (),
        {
            "shared.weight": ("renaming", "inverse of hf_t5_to_t5x()"),
            "encoder.block.1.layer.1.DenseReluDense.wo.weight": ("renaming", "inverse of hf_t5_to_t5x()"),
        },
    ),
}


@pytest.mark.parametrize("way", REASONS)
def test_a_plan_says_why_auto_took_each_leaf(way):
    source, target, given, reasons = REASONS[way]
    plan = ot.plan_restore(checkpoint(source), unflatten(target), [FoundRules(given)])
    assert plan.why.keys() == target.keys()
    entries = {entry["name"]: entry["why"] for entry in plan.to_json()["entries"]}
    for name, (kind, detail) in reasons.items():
        assert plan.why[name] == (kind, detail) and entries[name] == {"kind": kind, "detail": detail}
        assert f"  found     {why_text(plan.why[name])}" in plan.explain(name).splitlines()
        assert f"{why_text(plan.why[name])}: " in str(plan)
    by_rules = ot.plan_restore(checkpoint(source), unflatten(target), plan.found_rules)
    assert not by_rules.why and 'Why "auto"' not in str(by_rules)
    assert "  found  " not in by_rules.explain(next(iter(target)))


def test_reasons_of_a_source_have_its_name():
    sources = {"a": ot.Source(checkpoint({"dec/w": np.ones(2)}), "auto"), "b": checkpoint({"v": np.ones(3)})}
    target = {"a": {"decoder": {"x": np.ones(2)}}, "b": {"v": np.ones(3)}}
    assert ot.plan_restore(sources, target).why == {"a/decoder/x": ("structure", "")}
    target["b"] = {"u": np.ones(3)}
    assert not ot.plan_restore(sources, target, [ot.transforms.Rename([("b/v", "b/u")])]).why
