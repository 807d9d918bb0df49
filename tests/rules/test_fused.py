"""Flaxformer's fused kernels: keys before values, wi_0 before wi_1, on axis 1."""

import numpy as np

from orbax_t5x import rules
from orbax_t5x.testing.transform_suite import assert_same, run

LAYER = "target/decoder/layers_3"
KERNELS = np.arange(6 * 2 * 2 * 3, dtype=np.float32).reshape(6, 2, 2, 3)
GATES = np.arange(6 * 2 * 5, dtype=np.float32).reshape(6, 2, 5)
FUSED = {f"{LAYER}/self_attention/kv_fused/kernel": KERNELS, f"{LAYER}/mlp/wi_fused/kernel": GATES}
APART = {
    f"{LAYER}/self_attention/key/kernel": KERNELS[:, 0],
    f"{LAYER}/self_attention/value/kernel": KERNELS[:, 1],
    f"{LAYER}/mlp/wi_0/kernel": GATES[:, 0],
    f"{LAYER}/mlp/wi_1/kernel": GATES[:, 1],
}


def test_kernels_are_taken_apart_and_put_together():
    pack = rules.t5_fused_to_unscanned()
    for transform, source, target in ((pack, FUSED, APART), (pack.inverse(), APART, FUSED)):
        result, diagnostics = run(transform, source)
        assert diagnostics.problems == []
        assert_same(result, target)


def test_momentum_follows_and_the_one_mean_over_both_gates_is_reset():
    state = {}
    for name, value in FUSED.items():
        slots = f"state/param_states/{name.removeprefix('target/')}"
        # As T5X's rules for the logical axes have it: rows over all that is no embedding.
        over = (2, 3) if "kv_fused" in name else (1, 2)
        means = {"m": value + 1, "v_row": value.mean(over), "v_col": value.mean(0), "v": np.zeros(1, np.float32)}
        state.update({f"{slots}/{kind}": mean for kind, mean in means.items()})
    result, diagnostics = run(rules.t5_fused_to_unscanned(), {**FUSED, **state})
    assert diagnostics.problems == [] and "cannot follow" in diagnostics.warnings[0]
    for name, value in APART.items():
        slots = f"state/param_states/{name.removeprefix('target/')}"
        np.testing.assert_array_equal(result[f"{slots}/m"], value + 1)
        kinds = {kind for kind in ("v_row", "v_col") if f"{slots}/{kind}" not in diagnostics.lost}
        assert all(diagnostics.fidelity[f"{slots}/{kind}"] == "exact" for kind in kinds)
        assert kinds == ({"v_row", "v_col"} if "attention" in name else set())
        for kind in kinds:
            over = (1, 2) if kind == "v_row" else 0
            np.testing.assert_array_equal(result[f"{slots}/{kind}"], value.mean(over))
