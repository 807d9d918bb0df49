"""Transforms as the code that makes them."""

import dataclasses

import pytest

import orbax_t5x as ot
from orbax_t5x import rules
from orbax_t5x.text.code import calls_code
from tests.support.failed_plans import HF, HF_CONFIG, parameters


@pytest.mark.slow
def test_the_way_back_is_proposed_in_the_order_of_its_packs():
    both = rules.infer(ot.open_checkpoint(HF).leaves, parameters(dataclasses.replace(HF_CONFIG, scan_layers=True)))
    back = [rules.t5_minimal_to_scanned(6, 8).inverse(), rules.hf_t5_to_t5x().inverse()]
    assert eval(f"[{calls_code(both.inverse().parts)}]", {"ot": ot}) == back


@pytest.mark.parametrize(
    "text",
    [
        "ot.transforms.Translate()",
        "ot.transforms.AssignmentMap([('a', 'b'), ('c', None)])",
        "ot.transforms.Rename([('a', 'b')], require_match=False)",
        "ot.transforms.FollowOptimizer(ot.rules.hf_t5_to_t5x().inverse())",
        "ot.transforms.Cast('a', 'float32'), ot.rules.mesh_tf_to_t5x()",
    ],
)
def test_calls_are_written_without_defaults(text):
    assert calls_code(eval(f"[{text}]", {"ot": ot})) == text
