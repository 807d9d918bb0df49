"""Transforms of packs that depend on several names: biases of every layer, numbers of heads."""

import numpy as np
import pytest

from orbax_t5x import rules
from orbax_t5x.testing.transform_suite import as_numpy, assert_same, run
from tests.support.rule_networks import HEADS


def test_biases_of_every_layer_go_to_their_layers(hf):
    bias = "encoder.block.{}.layer.0.SelfAttention.relative_attention_bias.weight"
    own = {**hf, bias.format(1): hf[bias.format(0)]}
    result, diagnostics = run(rules.hf_t5_to_t5x(), own)
    assert "target/encoder/layers_1/relpos_bias/rel_embedding" in result and diagnostics.problems == []
    assert "target/decoder/relpos_bias/rel_embedding" in result
    assert_same(run(rules.t5x_to_hf_t5(), result)[0], {name: as_numpy(value) for name, value in own.items()})
    # One in the file, one per layer in the target.
    wanted = {f"target/encoder/layers_{i}/relpos_bias/rel_embedding": 0 for i in range(2)}
    result, _ = run(rules.hf_t5_to_t5x(), hf, {"target/token_embedder/embedding": 0, **wanted})
    assert set(wanted) <= set(result)


def other_heads(layout):
    """Packs for models of half and of twice as many heads of the same size."""
    heads, dim = HEADS
    make = getattr(rules, f"t5_minimal_to_{layout}")
    return [make(heads // 2, dim), make(heads * 2, dim)]


@pytest.mark.parametrize("layout", ["scanned", "unscanned"])
def test_other_numbers_of_heads_are_a_problem_both_ways(shapes, layout):
    """A reshape would take them: (E, H*D) has as many elements as (2E, H/2, D)."""
    for pack in other_heads(layout):
        for transform, source in ((pack, shapes["minimal"]), (pack.inverse(), shapes[layout])):
            _, diagnostics = run(transform, {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in source.items()})
            kernels = {name for name in source if name.endswith(("query/kernel", "out/kernel"))}
            told = [problem for problem in diagnostics.problems if problem.kind == "shape"]
            assert kernels <= {problem.leaf for problem in told}
            assert all("heads of" in problem.message and "num_heads" in str(problem.fix) for problem in told)
