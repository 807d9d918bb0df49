"""Hugging Face's Flax models become what their PyTorch twins become."""

import pytest

from orbax_t5x import rules
from orbax_t5x.testing.transform_suite import as_numpy, assert_same, run
from tests.support.rule_networks import as_pytorch


@pytest.mark.slow
def test_flax_models_become_what_their_pytorch_twins_become(hf_flax):
    twin = as_pytorch(hf_flax)
    for prefix in ("target/", "params/", ""):
        expected, _ = run(rules.hf_t5_to_t5x(prefix=prefix), twin)
        result, diagnostics = run(rules.hf_flax_t5_to_t5x(prefix=prefix), hf_flax)
        assert diagnostics.problems == []
        assert_same(result, expected)
    back, diagnostics = run(rules.hf_flax_t5_to_t5x().inverse(), run(rules.hf_flax_t5_to_t5x(), hf_flax)[0])
    assert diagnostics.problems == []
    assert_same(back, {name: as_numpy(lazy) for name, lazy in hf_flax.items()})
