"""Packs between T5X's layouts: logits agree, and the way back gives the same leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orbax_t5x import rules
from orbax_t5x.errors import LeafMismatchError
from orbax_t5x.testing.transform_suite import as_numpy, assert_same, run
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.trees.flat import flatten
from tests.support import t5_model
from tests.support.rule_networks import MINIMAL, PACKS, full


@pytest.mark.slow
def test_logits_agree_in_every_layout(networks):
    """The minimal network, and its parameters mapped into the other two, compute the same."""
    model, variables = networks["minimal"]
    inputs, targets = t5_model.batch(0, MINIMAL, size=2, length=8)
    expected = jax.jit(model.apply)({"params": variables["params"]}, inputs, targets)
    for layout in ("scanned", "unscanned"):
        pack = PACKS["minimal", layout]
        params = jax.tree.map(as_numpy, pack(full(variables["params"]), {})["target"])
        logits = jax.jit(networks[layout][0].apply)({"params": params}, inputs, targets)
        np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)
        assert float(jnp.std(expected)) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("way", PACKS, ids="-".join)
def test_there_and_back(networks, shapes, way):
    pack, (one, other) = PACKS[way], way
    source = flatten(full(networks[one][1]["params"]))
    if one == "unscanned":  # biases that differ by layer stay so
        source = {name: value + 1 if "relpos" in name else value for name, value in source.items()}
    mapped, diagnostics = run(pack, source, shapes[other])
    assert diagnostics.problems == [] and diagnostics.warnings == []
    assert {name: value.shape for name, value in mapped.items()} == {n: leaf.shape for n, leaf in shapes[other].items()}
    back, diagnostics = run(pack.inverse(), mapped, shapes[one])
    assert diagnostics.problems == [] and diagnostics.warnings == []
    assert_same(back, source)
    assert pack.inverse().inverse() == pack and pack.inverse() != pack


@pytest.mark.slow
@pytest.mark.parametrize("scan_axis", [0, 1, 2, -1])
def test_other_scan_axes(networks, scan_axis):
    source = {
        f"params/encoder/layers_{i}/{name}": np.random.default_rng(i).standard_normal(shape)
        for i in range(2)
        for name, shape in {"attention/query/kernel": (16, 16), "attention/out/kernel": (16, 16)}.items()
    }
    pack = rules.t5_minimal_to_scanned(4, 4, scan_axis=scan_axis)
    result, _ = run(pack, source)
    for kernel, shape in {"query": (16, 4, 4), "out": (4, 4, 16)}.items():
        layers = [source[f"params/encoder/layers_{i}/attention/{kernel}/kernel"].reshape(shape) for i in range(2)]
        np.testing.assert_array_equal(
            result[f"params/encoder/encoder/attention/{kernel}/kernel"], np.stack(layers, scan_axis)
        )
    assert_same(run(pack.inverse(), result)[0], source)


def test_biases_that_differ_do_not_become_one(networks, shapes):
    pack = PACKS["minimal", "scanned"]
    scanned = flatten(full(networks["scanned"][1]["params"]))
    result = pack.inverse().apply(scanned, shapes["minimal"], Diagnostics())
    with pytest.raises(LeafMismatchError, match="must equal"):
        result["target/encoder/relpos_bias/rel_embedding"].get()
    # A minimal model with a bias per layer keeps them.
    per_layer = {
        name.replace("/relpos_bias/", "/layers_0/relpos_bias/"): leaf for name, leaf in shapes["minimal"].items()
    }
    result, diagnostics = run(pack.inverse(), scanned, per_layer)
    assert diagnostics.problems == [] and "target/encoder/layers_2/relpos_bias/rel_embedding" in result


def test_a_part_of_a_network_and_a_wrong_one(networks):
    pack = PACKS["minimal", "scanned"]
    source = flatten(full(networks["minimal"][1]["params"]))
    encoder = {name: value for name, value in source.items() if "/encoder/" in name}
    result, diagnostics = run(pack, encoder)
    assert diagnostics.problems == [] and all("decoder" not in name for name in result)
    (problem,) = run(pack, {"target/layer1/w": np.zeros(3)})[1].problems
    assert problem.kind == "unused_rule" and "layers_0" in problem.message and "infer" in str(problem.fix)
    found = run(rules.t5_minimal_to_scanned(3, 5), source)[1].problems
    assert found and {problem.kind for problem in found} == {"shape"}
    without_layer = {name: value for name, value in source.items() if "/layers_1/mlp/wo/" not in name}
    found = run(pack, without_layer)[1].problems
    assert {problem.leaf for problem in found} == {f"target/{t}/{t}/mlp/wo/kernel" for t in ("encoder", "decoder")}
    lone_bias = {name: value for name, value in encoder.items() if "relpos" in name}
    assert "no layers" in run(pack, lone_bias)[1].problems[0].message
    with pytest.raises(ValueError, match="at least 1"):
        rules.t5_minimal_to_scanned(0, 4)
