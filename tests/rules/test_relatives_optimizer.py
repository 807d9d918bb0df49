"""Optimizers follow relatives between T5X's and Flaxformer's layouts: every leaf's value, by NumPy's own means."""

import numpy as np
import pytest

from orbax_t5x import rules
from orbax_t5x.testing.transform_suite import as_numpy
from orbax_t5x.transforms.diagnostics import Diagnostics
from tests.support import relative_slots
from tests.support import relative_trees as trees

SIZES = trees.Sizes()
T5 = "T5.1.1, mT5, ByT5, Flan-T5, UL2"


def moved(relative, source, target, optimizer):
    """Translates a train state between layouts; returns the target's names, those that agree, and the diagnostics."""
    one = trees.by_name(relative)
    plain = trees.minimal(one, SIZES)
    have, want = (
        trees.below("target/", tree) | optimizer(tree)
        for tree in (trees.LAYOUTS[layout](plain, one, SIZES) for layout in (source, target))
    )
    diagnostics = Diagnostics()
    result = rules.infer(have, want).apply(have, want, diagnostics)
    assert diagnostics.problems == [] and result.keys() <= want.keys()
    for name, value in result.items():
        np.testing.assert_allclose(as_numpy(value), want[name], rtol=2e-6, err_msg=name)
    return want, result, diagnostics


@pytest.mark.slow
@pytest.mark.parametrize(
    ("relative", "source", "target"),
    [
        (T5, "Flaxformer scanned", "T5X unscanned"),
        (T5, "T5X scanned", "Flaxformer, bias per layer"),
        ("umT5, Pile-T5", "T5X minimal", "Flaxformer scanned"),
        ("LongT5, transient-global", "T5X unscanned", "T5X minimal"),
        ("Switch", "Flaxformer scanned in subblocks", "T5X minimal"),
        ("ST-MoE", "T5X minimal", "Flaxformer scanned in subblocks"),
    ],
)
def test_adafactor_follows(relative, source, target):
    want, result, _ = moved(relative, source, target, relative_slots.adafactor)
    assert result.keys() == want.keys()


@pytest.mark.slow
def test_moments_follow_experts():
    want, result, diagnostics = moved(
        "gated mixture of experts", "T5X unscanned", "Flaxformer scanned in subblocks", relative_slots.adam
    )
    assert result.keys() == want.keys() and "approximate" not in diagnostics.fidelity.values()


@pytest.mark.slow
def test_only_the_moments_of_gates_are_reset_when_fused_kernels_are_taken_apart():
    want, result, diagnostics = moved(T5, "Flaxformer fused", "T5X minimal", relative_slots.adafactor)
    lost = want.keys() - result.keys()
    assert lost == {name for name in want if "/mlp/wi_" in name and name.endswith(("/v_row", "/v_col"))}
    assert lost <= diagnostics.lost.keys()
