"""Rule packs on real networks and real files: logits agree, names are those of the documents, the way back gives
the same leaves."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x import rules
from orbax_t5x import transforms as tr
from orbax_t5x.errors import LeafMismatchError, RestorePlanError
from orbax_t5x.testing.transform_suite import as_numpy, assert_same, run
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.trees.flat import flatten
from tests.conftest import GOLDENS
from tests.support import t5_model

MINIMAL = t5_model.T5Config(encoder_layers=3, decoder_layers=2)
LAYOUTS = {
    "minimal": MINIMAL,
    "unscanned": dataclasses.replace(MINIMAL, split_heads=True, per_layer_bias=True),
    "scanned": dataclasses.replace(MINIMAL, scan_layers=True),
}
HEADS = (MINIMAL.heads, MINIMAL.head_dim)
PACKS = {
    ("minimal", "scanned"): rules.t5_minimal_to_scanned(*HEADS),
    ("minimal", "unscanned"): rules.t5_minimal_to_unscanned(*HEADS),
    ("unscanned", "scanned"): rules.t5_unscanned_to_scanned(),
}
HF = GOLDENS / "safetensors" / "t5_1_1"
HF_CONFIG = t5_model.T5Config(embed=32, heads=6, head_dim=8, mlp=64, encoder_layers=2, decoder_layers=3)


@pytest.fixture(scope="module")
def networks():
    return {name: t5_model.init(config) for name, config in LAYOUTS.items()}


@pytest.fixture(scope="module")
def shapes(networks):
    """Flat abstract state dicts by layout, below `target/`."""
    return {
        name: flatten({"target": jax.eval_shape(lambda tree=variables["params"]: tree)})
        for name, (_, variables) in networks.items()
    }


def full(params):
    return {"target": jax.tree.map(np.asarray, params)}


# -- between T5X's layouts


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


def test_packs_are_values():
    assert rules.t5_minimal_to_scanned(4, 4) == rules.t5_minimal_to_scanned(4, 4)
    assert hash(rules.hf_t5_to_t5x()) == hash(rules.hf_t5_to_t5x())
    every = [
        *(rules.t5_minimal_to_scanned(4, 4), rules.t5_minimal_to_scanned(4, 8), rules.t5_minimal_to_unscanned(4, 4)),
        *(rules.t5_unscanned_to_scanned(), rules.t5_unscanned_to_scanned(scan_axis=0), rules.hf_t5_to_t5x()),
        *(rules.hf_t5_to_t5x(scale_decoder_outputs=True), rules.t5x_to_hf_t5(), rules.mesh_tf_to_t5x()),
        *(rules.t5x_decoder_to_maxtext(4, 4), rules.t5x_decoder_to_maxtext(4, 4, scanned=False)),
    ]
    assert len({pack.digest() for pack in every}) == len({pack.describe() for pack in every}) == len(every)
    state = {"a": 1}
    assert all(pack(state, {}, is_resuming=True) is state for pack in every)
    assert rules.t5_minimal_to_scanned(4, 4).describe() == "rules.t5_minimal_to_scanned(num_heads=4, head_dim=4)"


# -- Hugging Face


def hugging_face_table():
    """mappings.md section 5, line by line: T5X name -> (Hugging Face name, transposed)."""
    table = {
        "token_embedder/embedding": ("shared.weight", False),
        "encoder/encoder_norm/scale": ("encoder.final_layer_norm.weight", False),
        "decoder/decoder_norm/scale": ("decoder.final_layer_norm.weight", False),
    }
    bias = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    for tower, depth in (("encoder", 2), ("decoder", 3)):
        table[f"{tower}/relpos_bias/rel_embedding"] = (f"{tower}.{bias}", True)
        for i in range(depth):
            ours, theirs = f"{tower}/layers_{i}", f"{tower}.block.{i}.layer"
            attention = "attention" if tower == "encoder" else "self_attention"
            for a, b in (("query", "q"), ("key", "k"), ("value", "v"), ("out", "o")):
                table[f"{ours}/{attention}/{a}/kernel"] = (f"{theirs}.0.SelfAttention.{b}.weight", True)
                if tower == "decoder":
                    name = f"{ours}/encoder_decoder_attention/{a}/kernel"
                    table[name] = (f"{theirs}.1.EncDecAttention.{b}.weight", True)
            last = 1 if tower == "encoder" else 2
            for name in ("wi_0", "wi_1", "wo"):
                table[f"{ours}/mlp/{name}/kernel"] = (f"{theirs}.{last}.DenseReluDense.{name}.weight", True)
            table[f"{ours}/pre_{attention}_layer_norm/scale"] = (f"{theirs}.0.layer_norm.weight", False)
            table[f"{ours}/pre_mlp_layer_norm/scale"] = (f"{theirs}.{last}.layer_norm.weight", False)
            if tower == "decoder":
                table[f"{ours}/pre_cross_attention_layer_norm/scale"] = (f"{theirs}.1.layer_norm.weight", False)
    return table


@pytest.fixture(scope="module")
def expected_hf():
    with np.load(GOLDENS / "safetensors" / "t5_1_1_expected.npz") as file:
        return dict(file)


@pytest.fixture
def hf():
    with ot.open_checkpoint(HF) as checkpoint:
        yield dict(checkpoint.leaves)


def t5x_names(values):
    return {
        name: values[theirs].T if transposed else values[theirs]
        for name, (theirs, transposed) in hugging_face_table().items()
    }


@pytest.mark.parametrize("prefix", ["", "target/", "params/", "params/params/"])
def test_hugging_face_files_get_the_names_of_the_table(hf, expected_hf, prefix):
    expected = {prefix + name: value for name, value in t5x_names(expected_hf).items()}
    momenta = {f"state/param_states/0/mu/{name.removeprefix(prefix)}": 0 for name in expected}
    result, diagnostics = run(rules.hf_t5_to_t5x(), hf, {**momenta, **expected})
    assert diagnostics.problems == [] and diagnostics.warnings == []
    assert_same(result, expected)


def test_hugging_face_without_a_target_and_back(hf, expected_hf):
    result, diagnostics = run(rules.hf_t5_to_t5x(), hf)
    assert_same(result, {"target/" + name: value for name, value in t5x_names(expected_hf).items()})
    state = {**result, "state/step": np.int32(3), "state/param_states/0/mu/token_embedder/embedding": np.zeros(2)}
    back, diagnostics = run(rules.t5x_to_hf_t5(), state)
    assert diagnostics.problems == []
    assert_same(back, {name: as_numpy(value) for name, value in hf.items()})


HEAD = "target/decoder/logits_dense/kernel"


def test_a_tied_head_is_the_transposed_embedding_if_outputs_are_not_scaled(hf, expected_hf):
    assert json.loads((HF / "config.json").read_text())["scale_decoder_outputs"] is False
    target = {**dict.fromkeys("target/" + name for name in hugging_face_table()), HEAD: 0}
    for pack, warnings in ((rules.hf_t5_to_t5x(scale_decoder_outputs=False), 0), (rules.hf_t5_to_t5x(), 1)):
        result, diagnostics = run(pack, hf, target)
        assert diagnostics.problems == [] and len(diagnostics.warnings) == warnings
        np.testing.assert_array_equal(result[HEAD], expected_hf["shared.weight"].T)
    (problem,) = run(rules.hf_t5_to_t5x(scale_decoder_outputs=True), hf, target)[1].problems
    assert (problem.kind, problem.leaf) == ("missing", HEAD) and "scales the decoder's output" in problem.message
    # T5.1.0 (`wi`) scales; nothing else says so.
    old = {n.replace("wi_0", "wi"): v for n, v in hf.items() if "wi_1" not in n}
    (problem,) = run(rules.hf_t5_to_t5x(), old, target)[1].problems
    assert problem.leaf == HEAD and "logits_via_embedding" in str(problem.fix)
    assert not run(rules.hf_t5_to_t5x(), old, {name: 0 for name in target if name != HEAD})[1].problems


def test_a_head_of_its_own_is_used(hf):
    head = np.random.default_rng(0).standard_normal((128, 32)).astype(np.float32)
    result, _ = run(rules.hf_t5_to_t5x(), {**hf, "lm_head.weight": head}, {HEAD: 0})
    np.testing.assert_array_equal(result[HEAD], head.T)
    back, _ = run(rules.t5x_to_hf_t5(), result)
    np.testing.assert_array_equal(back["lm_head.weight"], head)


def test_repeated_and_renamed_embeddings(hf):
    copies = {f"{tower}.embed_tokens.weight": hf["shared.weight"] for tower in ("encoder", "decoder")}
    result, diagnostics = run(rules.hf_t5_to_t5x(), {**hf, **copies})
    assert diagnostics.problems == []
    assert_same(result, run(rules.hf_t5_to_t5x(), hf)[0])
    only_copy = {name: value for name, value in {**hf, **copies}.items() if name != "shared.weight"}
    assert_same(run(rules.hf_t5_to_t5x(), only_copy)[0], result)


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


# -- MaxText


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


# -- infer


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


def test_infer_says_what_it_saw_when_nothing_fits(shapes):
    with pytest.raises(RestorePlanError, match="unknown names"):
        rules.infer({"a": np.zeros(2)}, shapes["minimal"])
    shallow = {name: leaf for name, leaf in shapes["minimal"].items() if "layers_2" not in name}
    with pytest.raises(RestorePlanError, match="encoder of 2 layers"):
        rules.infer(shallow, shapes["scanned"])
    with pytest.raises(TypeError, match="infer takes"):
        rules.infer(3, shapes["scanned"])


# -- Hugging Face's Flax models


@pytest.fixture(params=["t5_1_1", "t5_1_0"])
def hf_flax(request):
    with ot.open_checkpoint(GOLDENS / "flax_msgpack" / request.param) as checkpoint:
        yield dict(checkpoint.leaves)


def as_pytorch(leaves):
    """The names and orientation that Transformers gives the same parameters in PyTorch: a Linear is transposed."""
    values = {}
    for name, lazy in leaves.items():
        module, kind = name.rpartition("/")[::2]
        value = as_numpy(lazy)
        values[f"{module.replace('/', '.')}.weight"] = value.T if kind == "kernel" else value
    return values


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
