"""A decoder gets MaxText's names, and comes back."""

import dataclasses
import json

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x import rules
from orbax_t5x import transforms as tr
from orbax_t5x.errors import RestorePlanError
from orbax_t5x.testing.transform_suite import as_numpy, assert_same, run
from orbax_t5x.trees.flat import unflatten
from tests.support.memory_checkpoint import checkpoint
from tests.support.prefixed_models import parameters


@pytest.mark.parametrize("scanned", [True, False])
def test_maxtext_has_the_heads_that_the_checkpoint_has(scanned):
    heads, dim = 4, 8
    state = {
        f"target/decoder/layers_{layer}/self_attention/{kernel}/kernel": np.zeros(shape, np.float32)
        for layer in range(2)
        for kernel, shape in (("query", (32, heads * dim)), ("out", (heads * dim, 32)))
    }
    right = rules.t5x_decoder_to_maxtext(heads, dim, scanned=scanned)
    wrong = rules.t5x_decoder_to_maxtext(heads // 2, dim, scanned=scanned)
    there, diagnostics = run(right, state)
    assert not diagnostics.problems
    for pack, source in ((wrong, state), (wrong.inverse(), there)):
        _, diagnostics = run(pack, source)
        assert {problem.leaf for problem in diagnostics.problems} == set(source)
        assert all("2 heads of 8 are 16" in problem.message for problem in diagnostics.problems)


@pytest.mark.parametrize("layout", ["scanned", "unscanned"])
def test_names_and_shapes_are_those_of_maxtexts_own_model(goldens, layout):
    """A checkpoint of MaxText has the item `params` around the variables of its model."""
    variables = json.loads((goldens / "trees" / "maxtext.json").read_text())[layout]
    theirs = {f"params/{name}": np.zeros(shape, np.float32) for name, shape in variables.items()}
    pack = rules.t5x_decoder_to_maxtext(3, 2, scanned=layout == "scanned")
    ours, diagnostics = run(pack.inverse(), theirs)
    assert not diagnostics.problems and len(ours) == 21
    again, diagnostics = run(pack, ours)
    assert not diagnostics.problems
    assert {name: view.shape for name, view in again.items()} == {name: view.shape for name, view in theirs.items()}


def test_a_decoder_gets_maxtext_names_and_comes_back():
    rng = np.random.default_rng(0)
    shapes = {
        "target/decoder/token_embedder/embedding": (48, 8),
        "target/decoder/decoder_norm/scale": (8,),
        "target/decoder/logits_dense/kernel": (8, 48),
    }
    for i in range(3):
        layer = f"target/decoder/layers_{i}"
        shapes |= {f"{layer}/self_attention/{p}/kernel": (8, 6) for p in ("query", "key", "value")}
        shapes |= {f"{layer}/self_attention/out/kernel": (6, 8), f"{layer}/mlp/wi_0/kernel": (8, 10)}
        shapes |= {f"{layer}/mlp/wo/kernel": (10, 8), f"{layer}/pre_mlp_layer_norm/scale": (8,)}
        shapes |= {f"{layer}/pre_self_attention_layer_norm/scale": (8,)}
    source = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for scanned in (True, False):
        pack = rules.t5x_decoder_to_maxtext(2, 3, scanned=scanned)
        result, diagnostics = run(pack, source)
        assert diagnostics.problems == []
        layers = "params/params/decoder/layers" if scanned else "params/params/decoder/layers_1"
        depth = (3,) if scanned else ()
        wanted = {
            f"{layers}/self_attention/query/kernel": (8, *depth, 2, 3),
            f"{layers}/self_attention/out/kernel": (2, *depth, 3, 8),
            f"{layers}/mlp/wo/kernel": (10, *depth, 8),
            f"{layers}/post_self_attention_layer_norm/scale": (8, *depth),
            "params/params/token_embedder/embedding": (48, 8),
            "params/params/decoder/logits_dense/kernel": (8, 48),
        }
        assert wanted.items() <= {name: value.shape for name, value in result.items()}.items()
        query = source["target/decoder/layers_1/self_attention/query/kernel"].reshape(8, 2, 3)
        found = result[f"{layers}/self_attention/query/kernel"]
        np.testing.assert_array_equal(found[:, 1] if scanned else found, query)
        assert_same(run(pack.inverse(), result)[0], source)
        inferred = rules.infer(source, result)
        assert inferred == dataclasses.replace(pack, found=inferred.found)
        assert_same(run(rules.infer(result, source), result)[0], source)


HEADS = (4, 4)


def decoder_only(prefix):
    names = {
        name: value
        for name, value in parameters("minimal").items()
        if name.startswith("decoder/") and "cross" not in name and "encoder_decoder" not in name
    }
    return {prefix + name: value for name, value in names.items()}


@pytest.mark.parametrize("there", ["params/params/", "params/", ""])
@pytest.mark.parametrize("here", ["target/", "params/params/", ""])
def test_maxtext_below_any_prefix(here, there):
    full = decoder_only(here)
    named = {name: value for name, value in full.items() if "relpos" not in name}
    for scanned in (True, False):
        pack = rules.t5x_decoder_to_maxtext(*HEADS, scanned=scanned)
        result, _ = run(pack, named)
        values = {there + name.removeprefix("params/params/"): as_numpy(value) for name, value in result.items()}
        opened = checkpoint(full)
        drop = tr.Drop(r".*relpos_bias/.*")
        found = rules.infer(opened, values)
        assert "t5x_decoder_to_maxtext" in found.name
        for chain in ([drop, pack], [drop, found]):
            plan = ot.plan_restore(opened, values, chain)
            assert_same({entry.name: entry.view.get() for entry in plan.entries}, values)
        back = rules.infer(values, named)
        assert_same({name: as_numpy(value) for name, value in run(back, values, named)[0].items()}, named)


def test_what_maxtext_has_no_place_for_is_a_problem_that_drop_permits():
    pack = rules.t5x_decoder_to_maxtext(*HEADS)
    with pytest.raises(RestorePlanError) as caught:
        ot.plan_restore(checkpoint(decoder_only("target/")), None, pack)
    (problem,) = caught.value.problems
    assert problem.kind == "rule" and "no T5 relative bias" in problem.message and "relpos_bias" in problem.message
    both = checkpoint({f"target/{name}": value for name, value in parameters("minimal").items()})
    with pytest.raises(RestorePlanError) as caught:
        ot.plan_restore(both, None, pack)
    bias, encoder = caught.value.problems
    assert "no T5 relative bias" in bias.message and "have no encoder" in encoder.message
    # What the problems say is what permits it.
    permits = [
        eval(str(problem.fix).partition("put ")[2].partition(" before")[0], {"ot": ot}) for problem in (bias, encoder)
    ]
    plan = ot.plan_restore(both, None, [*permits, pack])
    assert not any("encoder/" in entry.name or "relpos" in entry.name for entry in plan.entries)
    assert pack.inverse().inverse() == pack
    with pytest.raises(RestorePlanError, match="relative bias"):
        pack(unflatten(decoder_only("target/")), {})
