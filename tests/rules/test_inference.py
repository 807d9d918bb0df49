"""The pack between two trees is found by names and shapes."""

import dataclasses

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x import rules
from orbax_t5x import transforms as tr
from orbax_t5x.errors import RestorePlanError
from orbax_t5x.testing.transform_suite import as_numpy, assert_same, run
from orbax_t5x.trees.flat import flatten
from tests.conftest import GOLDENS
from tests.support import t5_model
from tests.support.rule_networks import LAYOUTS, MINIMAL, PACKS, as_pytorch, full

HF_CONFIG = t5_model.T5Config(embed=32, heads=6, head_dim=8, mlp=64, encoder_layers=2, decoder_layers=3)


@pytest.mark.parametrize("one", LAYOUTS)
@pytest.mark.parametrize("other", LAYOUTS)
def test_infer_finds_the_pack(networks, shapes, one, other):
    pack = rules.infer(shapes[one], full(networks[other][1]["params"]))
    expected = PACKS.get((one, other)) or (PACKS[other, one].inverse() if (other, one) in PACKS else None)
    if expected is None:
        assert pack.steps == () and pack.name == "nothing to map"
    else:
        assert pack == expected and pack.digest() == expected.digest()
    assert one in pack.found and other in pack.found and pack.found in repr(pack)
    source = flatten(full(networks["minimal"][1]["params"]))
    source = run(PACKS["minimal", one], source)[0] if one != "minimal" else source
    result, diagnostics = run(pack, source, shapes[other])
    assert diagnostics.problems == []
    assert {name: value.shape for name, value in result.items()} == {n: leaf.shape for n, leaf in shapes[other].items()}


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_infer_finds_the_axis_where_sizes_agree(axis):
    """A depth equal to the heads: one leaf alone would not tell."""
    kernels = {"attention/query/kernel": (8, 4), "mlp/wi_0/kernel": (8, 12), "mlp/wo/kernel": (12, 8)}
    source = {f"encoder/layers_{i}/{name}": np.zeros(shape) for i in range(2) for name, shape in kernels.items()}
    pack = rules.t5_minimal_to_scanned(2, 2, scan_axis=axis)
    target, _ = run(pack, source)
    assert rules.infer(source, target) == pack


@pytest.mark.parametrize("layout", ["minimal", "scanned", "unscanned"])
def test_infer_goes_through_two_packs(hf, layout):
    changes = {"scanned": {"scan_layers": True}, "unscanned": {"split_heads": True, "per_layer_bias": True}}
    _, variables = t5_model.init(dataclasses.replace(HF_CONFIG, **changes.get(layout, {})))
    target = flatten(full(variables["params"]))
    pack = rules.infer(hf, target)
    result, diagnostics = run(pack, hf, target)
    assert diagnostics.problems == [] and "hugging face" in pack.found and layout in pack.found
    assert {name: value.shape for name, value in result.items()} == {
        name: value.shape for name, value in target.items()
    }
    back, diagnostics = run(rules.infer(target, hf), result, dict(hf))
    assert diagnostics.problems == []
    assert_same({n: v for n, v in back.items() if n != "lm_head.weight"}, {n: as_numpy(v) for n, v in hf.items()})


@pytest.mark.slow
def test_infer_translates_bundles_with_their_slots():
    scanned = rules.t5_minimal_to_scanned(MINIMAL.heads, MINIMAL.head_dim)
    with ot.open_checkpoint(GOLDENS / "tf_bundle" / "t5_1_1_f32") as checkpoint:
        expected, _ = run(scanned, run(tr.Translate(), checkpoint.leaves)[0])
        for target in (expected, {name: leaf for name, leaf in expected.items() if name.startswith("target/")}):
            pack = rules.infer(checkpoint, target)
            result, diagnostics = run(pack, checkpoint.leaves, target)
            assert diagnostics.problems == [] and diagnostics.warnings == []
            assert pack.name.startswith("mesh_tf_to_t5x() then t5_minimal_to_scanned(")
            assert_same(result, target)
            assert ("Drop" in pack.name) == (target is not expected)
    assert any(name.endswith("/v_row") for name in expected)


def test_infer_finds_flax_models(hf_flax):
    plain, _ = run(rules.hf_flax_t5_to_t5x(), hf_flax)
    pack = rules.infer(hf_flax, plain)
    assert pack.name == "hf_flax_t5_to_t5x()" and "hugging face flax" in pack.found
    scanned, _ = run(rules.t5_minimal_to_scanned(2, 4), plain)
    both = rules.infer(hf_flax, scanned)
    result, diagnostics = run(both, hf_flax, scanned)
    assert diagnostics.problems == []
    assert_same(result, {name: as_numpy(value) for name, value in scanned.items()})
    assert_same(run(rules.infer(plain, hf_flax), plain)[0], {name: as_numpy(value) for name, value in hf_flax.items()})


@pytest.mark.slow
def test_infer_leads_from_one_foreign_layout_to_another(hf_flax):
    """Through T5X's names on the way, from and to Hugging Face's two, and from Mesh TensorFlow's."""
    plain, _ = run(rules.hf_flax_t5_to_t5x(), hf_flax)
    twin, flax = as_pytorch(hf_flax), {name: as_numpy(lazy) for name, lazy in hf_flax.items()}
    pytorch, _ = run(rules.hf_t5_to_t5x().inverse(), plain)
    for source, target in ((twin, flax), (flax, pytorch)):
        pack = rules.infer(source, target)
        result, diagnostics = run(pack, source, target)
        assert diagnostics.problems == [] and pack.has_inverse
        assert_same(result, {name: as_numpy(value) for name, value in target.items()})
    with ot.open_checkpoint(GOLDENS / "tf_bundle" / "t5_1_1_f32") as bundle:
        t5x, _ = run(tr.Translate(), bundle.leaves)
        parameters = {name: leaf for name, leaf in t5x.items() if name.startswith("target/")}
        expected, _ = run(rules.t5x_to_hf_t5(), parameters)
        pack = rules.infer(bundle, expected)
        result, diagnostics = run(pack, bundle.leaves, expected)
        assert diagnostics.problems == [] and not pack.has_inverse
        assert_same({name: result[name] for name in expected}, expected)
        with pytest.raises(RestorePlanError, match=r"mesh_tf_to_t5x\(\) has no inverse"):
            rules.infer(expected, bundle)
