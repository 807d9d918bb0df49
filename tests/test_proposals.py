"""What a plan proposes when leaves are missing: text that can be pasted, and that maps what it says."""

import dataclasses

import jax
import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x import rules
from orbax_t5x.restoring.proposals import pack_text, proposed_pack
from orbax_t5x.testing.transform_suite import as_numpy, assert_same, run
from orbax_t5x.trees.flat import flatten
from tests import t5_model
from tests.conftest import GOLDENS

HF = GOLDENS / "safetensors" / "t5_1_1"
HF_CONFIG = t5_model.T5Config(embed=32, heads=6, head_dim=8, mlp=64, encoder_layers=2, decoder_layers=3)


def pasted(text):
    """The transforms that a description stands for."""
    return eval(f"[{text}]", {"ot": ot})


def parameters(config):
    """Flat abstract parameters below `target/`."""
    _, variables = t5_model.init(config)
    return flatten({"target": jax.eval_shape(lambda: variables["params"])})


@pytest.mark.parametrize("is_scanned", [False, True])
def test_a_pack_is_proposed_as_text_that_makes_it(is_scanned):
    target = parameters(dataclasses.replace(HF_CONFIG, scan_layers=is_scanned))
    with ot.open_checkpoint(HF) as checkpoint:
        proposal = proposed_pack(checkpoint.leaves, target)
        assert proposal is not None
        expected = run(proposal.transform, checkpoint.leaves, target)[0]
        result = dict(checkpoint.leaves)
        for step in pasted(proposal.description):
            result = dict(run(step, result, target)[0])
        assert {name: np.asarray(as_numpy(value)).shape for name, value in result.items()} == {
            name: leaf.shape for name, leaf in target.items()
        }
        assert_same(result, expected)


def test_the_way_back_is_proposed_in_the_order_of_its_packs():
    both = rules.infer(ot.open_checkpoint(HF).leaves, parameters(dataclasses.replace(HF_CONFIG, scan_layers=True)))
    back = [rules.t5_minimal_to_scanned(6, 8).inverse(), rules.hf_t5_to_t5x().inverse()]
    assert pasted(pack_text(both.inverse())) == back


def test_no_pack_is_proposed_where_none_fits_or_none_is_needed():
    target = parameters(HF_CONFIG)
    assert proposed_pack(target, target) is None
    assert proposed_pack({"a": jax.ShapeDtypeStruct((2,), "float32"), "b": None}, target) is None


def test_of_two_ways_to_change_a_prefix_the_one_without_problems_is_proposed():
    """An optimizer's names begin alike on both sides: a rule for all of the target asks too much."""
    source = GOLDENS / "t5x_orbax" / "d8_adafactor"
    target = flatten(ot.restore(source, None))
    target = {name.removeprefix("target/"): leaf for name, leaf in target.items()}
    with pytest.raises(ot.RestorePlanError) as raised:
        ot.plan_restore(source, target)
    (problem,) = raised.value.problems
    chain = problem.fix.removeprefix("add transforms=")
    assert not ot.plan_restore(source, target, eval(chain, {"ot": ot})).unused
