"""Plans show for each leaf why `"auto"` took it."""

import json

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.restoring.broadcast.chunks import ReadCounts, ReadDecision
from orbax_t5x.restoring.broadcast.needs import StoreKind
from orbax_t5x.restoring.show.entries import broadcast_text, broadcast_totals, decision_data, decision_text, why_text
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


SENT = ReadDecision(StoreKind.BUCKET, ReadCounts(64, 64 << 20), ReadCounts(1, 1 << 20), 63 << 20)
OWN = ReadDecision(StoreKind.LOCAL, ReadCounts(2, 2 << 20), ReadCounts(1, 1 << 20), 1 << 20)
ALONE = ReadDecision(StoreKind.BUCKET, ReadCounts(4, 1 << 20), None)


def test_a_decision_is_a_sentence_with_the_numbers_of_both_ways():
    assert decision_text(SENT) == (
        "read once and sent: 1 request and 1.00 MiB, 63.0 MiB sent (bucket store); by each for itself "
        "64 requests and 64.0 MiB"
    )
    assert decision_text(OWN) == (
        "read by each process for itself: 2 requests and 2.00 MiB of all together (local store); once and sent "
        "1 request and 1.00 MiB, 1.00 MiB sent"
    )
    assert decision_text(ALONE).endswith("4 requests and 1.00 MiB of all together (bucket store); nothing can be sent")


def test_decisions_together():
    assert broadcast_text({}) == "" and broadcast_totals({}) is None
    assert broadcast_text({"a": OWN}) == ("All processes together take 2 requests and 2.00 MiB; each reads for itself.")
    # Two leaves with stored bytes in common have one decision, which is counted once.
    assert broadcast_text({"a": SENT, "b": SENT, "c": ALONE}) == (
        "All processes together take 5 requests and 2.00 MiB: 2 leaves (bucket store) are read once and sent, in "
        "1 request and 1.00 MiB instead of 64 requests and 64.0 MiB."
    )
    assert broadcast_totals({"a": SENT, "b": SENT, "c": ALONE}) == {"leaves_sent": 2, "requests": 5, "bytes": 2 << 20}


def test_a_decision_is_data():
    assert decision_data(None) is None
    assert json.loads(json.dumps(decision_data(SENT))) == {
        "is_broadcast": True,
        "store": "bucket",
        "own": {"requests": 64, "bytes": 64 << 20},
        "once": {"requests": 1, "bytes": 1 << 20, "bytes_sent": 63 << 20},
    }
    assert decision_data(ALONE)["once"] is None
