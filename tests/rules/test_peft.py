"""PEFT's adapters merged into base models of every naming, against NumPy by the formulas of the paper."""

import math

import jax
import numpy as np
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x import rules
from orbax_t5x import transforms as tr
from orbax_t5x.errors import RestorePlanError
from orbax_t5x.trees.flat import flatten, unflatten
from tests.support import t5_layouts as t5
from tests.support.memory_checkpoint import checkpoint

RNG = np.random.default_rng(0)
PLAIN = {name: RNG.normal(size=value.shape).astype(np.float32) for name, value in t5.minimal().items()}
TORCH = t5.hugging_face(PLAIN)
OURS = dict(zip(TORCH, PLAIN, strict=True))
BIAS = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias"
MODULES = [
    *(name.removesuffix(".weight") for name in TORCH if name.endswith(("Attention.q.weight", "Attention.o.weight"))),
    "decoder.block.1.layer.2.DenseReluDense.wo",
    "lm_head",
]
EMBEDDINGS = ["shared", BIAS]
RANK = 3
CONFIG = {"peft_type": "LORA", "r": RANK, "lora_alpha": 5}


def is_embedding(module):
    return module in EMBEDDINGS


def factors_of(modules, ranks=None):
    """A and B of each module, as PEFT makes them."""
    found = {}
    for module in modules:
        rank = (ranks or {}).get(module, RANK)
        rows, columns = TORCH[f"{module}.weight"].shape
        sizes = (rows, columns) if is_embedding(module) else (columns, rows)
        found[module] = tuple(RNG.normal(size=size).astype(np.float32) for size in ((rank, sizes[0]), (sizes[1], rank)))
    return found


def peft_names(factors, name="", below="base_model.model."):
    leaves = {}
    for module, pair in factors.items():
        for letter, value in zip("AB", pair, strict=True):
            if is_embedding(module):
                leaves[f"{below}{module}.lora_embedding_{letter}{name}"] = value
            else:
                leaves[f"{below}{module}.lora_{letter}{name}.weight"] = value
    return leaves


def torch_merged(factors, scales=None):
    """The formula of LoRA in PyTorch's layout."""
    merged = dict(TORCH)
    for module, (a, b) in factors.items():
        delta = (scales or {}).get(module, 5 / RANK) * b.astype(np.float64) @ a
        merged[f"{module}.weight"] = TORCH[f"{module}.weight"] + (delta.T if is_embedding(module) else delta)
    return merged


def minimal_of(torch):
    return {
        ours: value if theirs == "shared.weight" else value.T
        for (theirs, ours), value in zip(OURS.items(), torch.values(), strict=True)
    }


LAYOUTS = {
    "torch": lambda plain: t5.hugging_face(plain),
    "flax": lambda plain: t5.hugging_face_flax(plain),
    "minimal": lambda plain: t5.below("target/", plain),
    "bare": lambda plain: plain,
    "unscanned": lambda plain: t5.below("params/", t5.unscanned(plain)),
    "scanned": lambda plain: t5.below("target/", t5.scanned(plain)),
    "scanned 0": lambda plain: t5.below("params/params/", t5.scanned(plain, axis=0)),
    "flaxformer": lambda plain: t5.scanned(plain, split=False),
}


def merged(base, adapter, pack, target=None, **options):
    sources = {"base": checkpoint(base), "adapter": checkpoint(adapter)}
    return flatten(ot.restore(sources, target, [pack], **options))


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["", ".default"])
def test_adapters_are_merged_into_every_naming(layout, name):
    # In layouts with a relative bias per layer one adapter of the tower's bias has no single leaf.
    has_bias = layout in ("torch", "flax", "minimal", "bare")
    factors = factors_of([*MODULES, "shared", *([BIAS] if has_bias else [])])
    pack = rules.peft_lora({**CONFIG, "target_modules": [*MODULES, *EMBEDDINGS]})
    found = merged(LAYOUTS[layout](PLAIN), peft_names(factors, name), pack)
    assert_close(found, LAYOUTS[layout](minimal_of(torch_merged(factors))))


def test_square_kernels_get_the_delta_and_not_its_transpose():
    square = {"encoder.block.0.layer.0.SelfAttention.q.weight": np.zeros((4, 4), np.float32)}
    a, b = RNG.normal(size=(2, 4)).astype(np.float32), RNG.normal(size=(4, 2)).astype(np.float32)
    q = "base_model.model.encoder.block.0.layer.0.SelfAttention.q"
    adapter = {f"{q}.lora_A.weight": a, f"{q}.lora_B.weight": b}
    config = {"r": 2, "lora_alpha": 2}
    ours = "target/encoder/layers_0/attention/query/kernel"
    assert_close(merged(square, adapter, rules.peft_lora(config)), {next(iter(square)): b @ a})
    kernel = {ours: np.zeros((4, 4), np.float32)}
    assert_close(merged(kernel, adapter, rules.peft_lora(config)), {ours: (b @ a).T})
    reversed_config = {**config, "fan_in_fan_out": True}
    assert_close(merged(square, adapter, rules.peft_lora(reversed_config)), {next(iter(square)): (b @ a).T})
    assert_close(merged(kernel, adapter, rules.peft_lora(reversed_config)), {ours: (b @ a).T})


def test_patterns_give_modules_other_ranks_and_alphas():
    ranks = {MODULES[0]: 2, MODULES[1]: 2}
    alphas = {module: 7 for module in MODULES if "decoder" in module and module.endswith(".q")}
    factors = factors_of(MODULES, ranks)
    config = {
        **CONFIG,
        "rank_pattern": {MODULES[0]: 2, rf"^{MODULES[1]}": 2},
        "alpha_pattern": {r"decoder\..*Attention\.q": 7},
    }
    for by_root in (False, True):
        pack = rules.peft_lora({**config, "use_rslora": by_root})
        scales = {
            module: alphas.get(module, 5) / (math.sqrt(ranks.get(module, RANK)) if by_root else ranks.get(module, RANK))
            for module in MODULES
        }
        assert_close(merged(TORCH, peft_names(factors), pack), torch_merged(factors, scales))


def test_modules_that_are_stored_whole_replace_the_base_models():
    head = RNG.normal(size=(t5.V + 2, t5.E)).astype(np.float32)
    o = "encoder.block.2.layer.0.SelfAttention.o"
    kernel = RNG.normal(size=TORCH[f"{o}.weight"].shape).astype(np.float32)
    adapter = {
        "base_model.model.lm_head.modules_to_save.default.weight": head,
        f"base_model.model.{o}.base_layer.weight": kernel,
        **peft_names(factors := factors_of([o])),
    }
    pack = rules.peft_lora({**CONFIG, "modules_to_save": ["lm_head"]})
    expected = {**TORCH, "lm_head.weight": head}
    a, b = factors[o]
    expected[f"{o}.weight"] = kernel + 5 / RANK * b @ a
    assert_close(merged(TORCH, adapter, pack), expected)
    scanned = LAYOUTS["scanned"](PLAIN)
    found = merged(scanned, adapter, pack)
    np.testing.assert_array_equal(found["target/decoder/logits_dense/kernel"], head.T)
    out = "target/encoder/encoder/attention/out/kernel"
    layers = scanned[out].copy()
    layers[:, 2] = expected[f"{o}.weight"].T.reshape(t5.H, t5.D, t5.E)
    np.testing.assert_allclose(found[out], layers, rtol=1e-5, atol=1e-5)
    tied = {name: value for name, value in TORCH.items() if name != "lm_head.weight"}
    np.testing.assert_array_equal(merged(tied, adapter, pack)["lm_head.weight"], head)


def test_a_model_of_another_kind_below_another_prefix():
    """GPT-2's file has no `transformer.`, which its model has, and its weights are (in, out)."""
    base = {"h.0.attn.c_attn.weight": np.zeros((3, 6), np.float32), "h.0.attn.c_attn.bias": np.ones(6, np.float32)}
    a, b = np.ones((2, 3), np.float32), np.arange(12, dtype=np.float32).reshape(6, 2)
    c = "base_model.model.transformer.h.0.attn.c_attn"
    adapter = {f"{c}.lora_A.weight": a, f"{c}.lora_B.weight": b, f"{c}.bias": np.zeros(6, np.float32)}
    pack = rules.peft_lora(
        {"r": 2, "lora_alpha": 1, "fan_in_fan_out": True, "bias": "all", "target_modules": "all-linear"}
    )
    expected = {"h.0.attn.c_attn.weight": (b @ a).T / 2, "h.0.attn.c_attn.bias": np.zeros(6)}
    assert_close(merged(base, adapter, pack), expected)


@pytest.mark.parametrize("layout", ["minimal", "scanned", "torch"])
def test_factors_beside_their_leaves(layout):
    factors = factors_of([module for module in MODULES if module.endswith(".q")])
    base = LAYOUTS[layout](PLAIN)
    pack = rules.peft_lora(CONFIG, merge=False)
    found = merged(base, peft_names(factors), pack)
    assert {name for name in found if "lora" not in name} == base.keys()
    assert_close({name: found[name] for name in base}, base)
    q = "encoder.block.1.layer.0.SelfAttention.q"
    a, b = factors[q]
    if layout == "torch":
        np.testing.assert_array_equal(found[f"{q}.lora_a"], a)
        np.testing.assert_array_equal(found[f"{q}.lora_b"], b)
    elif layout == "minimal":
        np.testing.assert_array_equal(found["target/encoder/layers_1/attention/query/lora_a"], a.T)
        np.testing.assert_array_equal(found["target/encoder/layers_1/attention/query/lora_b"], b.T)
        add = tr.AddLowRank(r"(.*)/kernel", r"\1/lora_a", r"\1/lora_b", 5 / RANK)
        assert_close(
            flatten(jax.tree.map(np.asarray, add(unflatten(found), {}))),
            LAYOUTS[layout](minimal_of(torch_merged(factors))),
        )
    else:
        assert found["target/encoder/encoder/attention/query/lora_a"].shape == (t5.E, 3, RANK)
        layer = found["target/encoder/encoder/attention/query/lora_b"][:, 1]
        np.testing.assert_array_equal(layer, b.T.reshape(RANK, t5.H, t5.D))
    with pytest.raises(RestorePlanError, match="has no inverse"):
        pack.inverse()


def failed(base, adapter, pack, **options):
    sources = {"base": checkpoint(base), "adapter": checkpoint(adapter)}
    with pytest.raises(RestorePlanError) as caught:
        ot.plan_restore(sources, None, [pack], **options)
    return caught.value.problems


def test_every_leaf_of_the_adapters_is_used_or_a_problem():
    good = peft_names(factors_of([MODULES[0]]))
    q = f"base_model.model.{MODULES[1]}"
    rows, columns = TORCH[f"{MODULES[1]}.weight"].shape
    a, b = np.ones((RANK, columns), np.float32), np.ones((rows, RANK), np.float32)
    bad = {
        "base_model.model.other.lora_A.weight": (a, "no leaf for 'other.weight'"),
        f"{q}.lora_A.weight": (a, "has no lora_B"),
        f"{q}.lora_magnitude_vector": (b[:, 0], "no part of LoRA"),
        "base_model.model.prompt": (b, "no part of LoRA"),
        "base_model.model.classifier.weight": (b, "no leaf for 'classifier.weight'"),
    }
    for name, (value, message) in bad.items():
        (problem,) = failed(TORCH, {**good, name: value}, rules.peft_lora(CONFIG))
        assert problem.kind == "unmapped" and problem.leaf == f"adapter/{name}" and message in problem.message
        sources = {"base": checkpoint(TORCH), "adapter": checkpoint({**good, name: value})}
        plan = ot.plan_restore(sources, None, [rules.peft_lora(CONFIG)], strict=False)
        assert any("change nothing" in line for line in plan.warnings)
    pair = {f"{q}.lora_A.weight": a, f"{q}.lora_B.weight": b}
    targets = failed(TORCH, pair, rules.peft_lora({**CONFIG, "target_modules": ["k"]}))
    assert len(targets) == 2 and "does not name its module" in targets[0].message
    ranks = failed(TORCH, pair, rules.peft_lora({"r": 4, "lora_alpha": 5}))
    assert len(ranks) == 2 and "rank 4" in ranks[0].message
    twice = {**pair, f"{q}.lora_A.other.weight": a}
    (problem,) = failed(TORCH, twice, rules.peft_lora(CONFIG))
    assert "the same factor of another adapter" in problem.message
    (shape,) = failed(TORCH, {f"{q}.lora_A.weight": a, f"{q}.lora_B.weight": b[:5]}, rules.peft_lora(CONFIG))
    assert shape.kind == "shape" and "(5, 10), and the leaf (12, 10)" in shape.message
    (missing,) = failed(TORCH, pair, rules.peft_lora(CONFIG, base="model"))
    assert missing.kind == "missing" and "source 'model'" in missing.message


def test_one_layer_beyond_the_stacked_ones_and_layers_without_adapters():
    name = "encoder.block.7.layer.0.SelfAttention.q"
    a, b = np.ones((RANK, t5.E), np.float32), np.ones((t5.J, RANK), np.float32)
    (problem,) = failed(LAYOUTS["scanned"](PLAIN), peft_names({name: (a, b)}), rules.peft_lora(CONFIG))
    assert "layer 7" in problem.message and "3 layers" in problem.message
    one = peft_names(factors_of([MODULES[0]]))
    (problem,) = failed(LAYOUTS["scanned"](PLAIN), one, rules.peft_lora(CONFIG, merge=False))
    assert "only 1 have adapters" in problem.message


def test_files_and_a_target_with_another_prefix(tmp_path):
    factors = factors_of(MODULES)
    (tmp_path / "adapter").mkdir()
    safetensors.numpy.save_file(peft_names(factors), tmp_path / "adapter" / "adapter_model.safetensors")
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text('{"peft_type": "LORA", "r": 3, "lora_alpha": 5, "target_modules": ".*"}')
    safetensors.numpy.save_file({n: np.ascontiguousarray(v) for n, v in TORCH.items()}, tmp_path / "model.safetensors")
    sources = {"base": tmp_path / "model.safetensors", "adapter": tmp_path / "adapter"}
    target = unflatten({f"params/{name}": np.zeros_like(value) for name, value in PLAIN.items()})
    pack = rules.peft_lora(config)
    state = ot.restore(sources, target, [pack, rules.hf_t5_to_t5x()])
    assert_close(flatten(state), t5.below("params/", minimal_of(torch_merged(factors))))
    assert pack == rules.peft_lora(str(config)) == eval(pack.as_code()) and pack.digest()
    assert pack.digest() != rules.peft_lora({"r": 3, "lora_alpha": 6}).digest()
    ours = {"base": checkpoint(t5.below("target/", PLAIN)), "adapter": tmp_path / "adapter"}
    assert_close(flatten(ot.restore(ours, target, pack)), flatten(state))


def test_the_optimizers_state_stays_with_a_warning():
    base = {**LAYOUTS["minimal"](PLAIN), "state/param_states/token_embedder/embedding/v": np.ones(3, np.float32)}
    sources = {"base": checkpoint(base), "adapter": checkpoint(peft_names(factors_of([MODULES[0]])))}
    plan = ot.plan_restore(sources, None, [rules.peft_lora(CONFIG)])
    assert any("optimizer's state stays" in line for line in plan.warnings)


def test_adapters_of_the_shared_embedding_say_what_pefts_own_model_computes():
    """By PEFT 0.21.2: logits of T5 change by 0.0 until it merges, for a saved `shared` as for factors of it."""
    saved = {"base_model.model.shared.weight": TORCH["shared.weight"] + 1}
    towers = {f"base_model.model.{tower}.embed_tokens.weight": TORCH["shared.weight"] + 1 for tower in t5.DEPTHS}
    config = {**CONFIG, "modules_to_save": ["shared", "embed_tokens"]}
    for adapter, warns in (
        (saved, True),
        (peft_names(factors_of(["shared"])), True),
        ({**saved, **towers}, False),
        (peft_names(factors_of(["lm_head"])), False),
    ):
        plan = ot.plan_restore(
            {"base": checkpoint(TORCH), "adapter": checkpoint(adapter)}, None, rules.peft_lora(config)
        )
        assert any("PEFT's own model" in warning for warning in plan.warnings) == warns
