"""A chain of transforms as a record describes it."""

import functools
import re

import numpy as np

import orbax_t5x as ot
from orbax_t5x.provenance import records as provenance
from orbax_t5x.provenance.chains import record_rules, texts_of

T = ot.transforms


def with_rules(state, target, rules, *, is_resuming=False):
    return state


def entry(*transforms, source="/data/model.ckpt-5", format="tf_bundle", **answer):
    return provenance.make_entry(source, format, record_rules(transforms), **answer)


def test_shapes_and_axes_are_no_lists_of_rules():
    tr = ot.transforms
    chain = [tr.Reshape("a", (2, 3)), tr.Pad("a", (3, None), tr.FALLBACK), tr.Slice("a", np.s_[:3, :2])]
    texts = ("Reshape('a', (2, 3))", "Pad('a', (3, None), value=FALLBACK)", "Slice('a', [:3, :2])")
    assert texts_of(record_rules(chain)) == list(texts)
    follow = [tr.FollowOptimizer(one) for one in chain]
    assert texts_of(record_rules(follow)) == [f"FollowOptimizer({text})" for text in texts]


def test_a_pack_is_recorded_by_its_name():
    one, other = ot.rules.hf_t5_to_t5x(), ot.rules.t5_minimal_to_scanned(2, 4).inverse()
    told = ["rules.hf_t5_to_t5x()", "rules: inverse of t5_minimal_to_scanned(num_heads=2, head_dim=4)"]
    assert texts_of(record_rules([one, other])) == told


def test_rules_are_recorded_one_by_one():
    rules = [("a/(.*)", r"b/\1"), ("c", None)]
    assert entry(T.AssignmentMap(rules))["transforms"] == [
        r"AssignmentMap: ('a/(.*)', 'b/\\1')",
        "AssignmentMap: ('c', None)",
    ]
    partial = functools.partial(with_rules, rules=[("a", "b"), (re.compile("c"), np.zeros((2, 3)))])
    name = f"{__name__}.with_rules"
    assert entry(partial)["transforms"] == [f"{name}: ('a', 'b')", f"{name}: ('c', float64[2,3])"]
