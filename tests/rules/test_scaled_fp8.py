"""Float8 weights with a scale beside each, as text encoders are published: read as weight times scale, never without.

Expected values are NumPy's.
"""

import jax
import ml_dtypes
import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x import rules
from orbax_t5x.errors import LeafMismatchError, RestorePlanError
from orbax_t5x.trees.flat import flatten, unflatten
from tests.conftest import GOLDENS
from tests.support import t5_layouts as t5
from tests.support.memory_checkpoint import checkpoint
from tests.support.safetensors_files import container, tensor

FLOAT8 = ml_dtypes.float8_e4m3fn
PACK = rules.scaled_fp8_to_float32()
TARGET = "target/"


def quantized(plain, prefix=""):
    """Hugging Face's names with scaled kernels, of shape () and (1,) in turn, and the same model in float32."""
    stored, exact = {}, {}
    for at, (name, value) in enumerate(t5.hugging_face(plain).items()):
        if value.ndim < 2 or "relative" in name or name == "shared.weight":
            stored[name] = exact[name] = value
            continue
        weight, scale = (value % 1000 / 100).astype(FLOAT8), np.float32(0.013 * (at + 1))
        stored[name] = weight
        stored[name.removesuffix("weight") + "scale_weight"] = scale if at % 2 else scale[None]
        exact[name] = weight.astype(np.float32) * scale
    stored["scaled_fp8"] = np.zeros(0, FLOAT8)
    return t5.below(prefix, stored), exact


def t5x_of(exact, plain):
    """The same values under T5X's names, by the names of the leaf that each came from."""
    theirs = {name: value for name, value in zip(plain, t5.hugging_face(plain), strict=True)}
    values = {name: exact[theirs[name]] for name in plain}
    return {TARGET + name: value if name == "token_embedder/embedding" else value.T for name, value in values.items()}


PLAIN = t5.minimal(towers=("encoder",))
STORED, EXACT = quantized(PLAIN)
T5X = t5x_of(EXACT, PLAIN)


def safetensors_of(leaves):
    """A file's bytes; Transformers' own writer has no float8 for NumPy."""
    header, data = {}, b""
    for name, value in leaves.items():
        raw = np.ascontiguousarray(value).tobytes()
        kind = "F8_E4M3" if value.dtype == FLOAT8 else "F32"
        header[name] = tensor(len(data), len(data) + len(raw), list(value.shape), kind)
        data += raw
    return container(header, data)


def zeros(tree, dtype=None):
    return unflatten({name: np.zeros(value.shape, dtype or value.dtype) for name, value in tree.items()})


def assert_equal(found, expected, dtype=np.float32):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == dtype, name
        np.testing.assert_array_equal(found[name], value.astype(dtype), err_msg=name)


def problems(source, target, transforms, **options):
    with pytest.raises(RestorePlanError) as caught:
        ot.plan_restore(checkpoint(source), None if target is None else zeros(target), transforms, **options)
    return caught.value.problems


def test_weights_are_multiplied_on_the_way_to_t5x():
    whole = t5.minimal()
    stored, exact = quantized(whole)
    assert_equal(flatten(ot.restore(checkpoint(stored), None, rules.hf_t5_to_t5x())), t5x_of(exact, whole))
    prefix = "text_encoders.t5xxl.transformer."
    stored, exact = quantized(PLAIN, prefix)
    wanted = t5x_of(exact, PLAIN)
    for given in ("auto", rules.hf_t5_to_t5x()):
        assert_equal(flatten(ot.restore(checkpoint(stored), zeros(wanted), given)), wanted)
    scanned = t5.below(TARGET, t5.scanned({n.removeprefix(TARGET): v for n, v in wanted.items()}))
    assert_equal(flatten(ot.restore(checkpoint(stored), zeros(scanned), "auto")), scanned)
    half = ot.restore(checkpoint(stored), zeros(wanted), "auto", dtype="bfloat16")
    assert_equal(flatten(half), wanted, ml_dtypes.bfloat16)
    plan = ot.plan_restore(checkpoint(stored), zeros(wanted), "auto")
    assert f"{prefix}scaled_fp8" in plan.dropped and not plan.unused
    # One byte of each weight that is quantized, and its scale.
    assert plan.bytes_to_read == sum(np.asarray(value).nbytes for value in stored.values())


def test_a_file_of_real_names_is_read_shard_by_shard(tmp_path):
    """The golden that Transformers wrote, quantized: each device reads its columns of the weights, and the scales."""
    with ot.open_checkpoint(GOLDENS / "safetensors" / "t5_1_1") as opened:
        real = {name: leaf.get() for name, leaf in opened.leaves.items()}
    stored, exact = {"scaled_fp8": np.zeros(0, FLOAT8)}, dict(real)
    for name, value in real.items():
        if "DenseReluDense" in name:
            scale = np.float32(np.abs(value).max() / 448)
            weight = (value / scale).astype(FLOAT8)
            stored |= {name: weight, name.removesuffix("weight") + "scale_weight": scale}
            exact[name] = weight.astype(np.float32) * scale
    (tmp_path / "model.safetensors").write_bytes(safetensors_of({**real, **stored}))
    plain = flatten(ot.restore(GOLDENS / "safetensors" / "t5_1_1", None, rules.hf_t5_to_t5x()))
    mesh = jax.make_mesh((4,), ("mlp",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "mlp"))
    name = "target/decoder/layers_1/mlp/wi_0/kernel"
    target = {name: jax.ShapeDtypeStruct(plain[name].shape, "float32", sharding=split)}
    plan = ot.plan_restore(tmp_path, unflatten(target), rules.hf_t5_to_t5x(), strict=False)
    assert plan.bytes_to_read == plain[name].size + 4
    found = flatten(plan.execute())[name]
    theirs = "decoder.block.1.layer.2.DenseReluDense.wi_0.weight"
    np.testing.assert_array_equal(found, exact[theirs].T)
    np.testing.assert_allclose(found, plain[name], atol=np.abs(plain[name]).max() / 16)
    everything = flatten(ot.restore(tmp_path, None, rules.hf_t5_to_t5x()))
    assert everything.keys() == plain.keys()


def test_names_that_stay_lose_their_scales_by_auto_and_by_the_pack():
    for transforms in ("auto", PACK):
        assert_equal(flatten(ot.restore(checkpoint(STORED), zeros(EXACT), transforms)), EXACT)
    assert rules.infer(STORED, EXACT).name == PACK.name
    # The scales of a file that stays as it is stay with it.
    same = flatten(ot.restore(checkpoint(STORED), zeros(STORED), "auto"))
    assert all(same[name].tobytes() == np.asarray(value).tobytes() for name, value in STORED.items())


def test_weights_without_their_scales_are_no_silent_result():
    (problem,) = problems(STORED, EXACT, ())
    assert problem.kind == "leftover" and "wrong" in problem.message and problem.fix.transforms == (PACK,)
    plan = ot.plan_restore(checkpoint(STORED), zeros(EXACT), strict=False)
    assert any("without the scale" in warning for warning in plan.warnings)
    # A float8 weight that has no scale is its own value.
    alone = {name: value for name, value in STORED.items() if "scale" not in name}
    expected = {name: value.astype(np.float32) for name, value in alone.items()}
    assert_equal(flatten(ot.restore(checkpoint(alone), zeros(EXACT))), expected)


def test_a_scale_without_a_weight_or_of_several_numbers_is_a_problem():
    query = "encoder.block.1.layer.0.SelfAttention.q."
    orphan = {name: value for name, value in STORED.items() if name != query + "weight"}
    for pack in (PACK, rules.hf_t5_to_t5x()):
        (problem,) = problems(orphan, None, pack)
        assert problem.leaf == query + "scale_weight" and repr(query + "weight") in problem.message
        (problem,) = problems({**STORED, query + "scale_weight": np.ones(10, np.float32)}, None, pack)
        assert problem.leaf == query + "weight" and "(10,)" in problem.message


def test_nothing_quantizes_on_the_way_back():
    for source, target in ((T5X, STORED), (EXACT, STORED)):
        for transforms in ("auto", rules.t5x_to_hf_t5()) if source is T5X else ():
            (problem,) = problems(source, target, transforms)
            assert problem.kind == "rule" and "choose a scale" in problem.message
    with pytest.raises(RestorePlanError, match="no inverse: to quantize is to choose a scale"):
        PACK.inverse()
    pack = rules.infer(STORED, EXACT)
    assert not pack.has_inverse
    # Hugging Face's names without scales come back.
    assert_equal(flatten(ot.restore(checkpoint(T5X), zeros(EXACT), "auto")), EXACT)


def test_a_conversion_writes_the_products(tmp_path):
    ot.convert(checkpoint(STORED), tmp_path / "out", rules.hf_t5_to_t5x(), dtype="bfloat16")
    assert_equal(flatten(ot.restore(tmp_path / "out", None)), T5X, ml_dtypes.bfloat16)


def test_copies_of_the_embedding_are_compared_after_they_are_multiplied():
    scale = {"encoder.embed_tokens.scale_weight": np.float32(2)}
    weight = STORED["shared.weight"].astype(FLOAT8)
    copies = {"shared.weight": weight.astype(np.float32) * 2, "encoder.embed_tokens.weight": weight, **scale}
    wanted = {**T5X, f"{TARGET}token_embedder/embedding": copies["shared.weight"]}
    assert_equal(flatten(ot.restore(checkpoint({**STORED, **copies}), zeros(wanted), "auto")), wanted)
    copies["encoder.embed_tokens.scale_weight"] = np.float32(4)
    with pytest.raises(LeafMismatchError, match="must equal"):
        ot.restore(checkpoint({**STORED, **copies}), zeros(wanted), "auto")


def test_models_that_no_pack_knows_are_aligned_with_their_products():
    """Another program's names throughout, and Hugging Face's into an NNX model."""
    modules = {"q_proj": (7, 5), "k_proj": (7, 5), "up": (9, 5), "down": (5, 9)}
    stored, exact = {}, {}
    for at, (name, shape) in enumerate((f"h.{i}.{one}", shape) for i in range(2) for one, shape in modules.items()):
        weight, scale = (np.arange(np.prod(shape)).reshape(shape) % 13 - 6 + at).astype(FLOAT8), np.float32(0.1 + at)
        stored |= {f"{name}.weight": weight, f"{name}.scale_weight": scale}
        exact[f"model/layers/{name[2]}/{name[4:]}/kernel"] = (weight.astype(np.float32) * scale).T
    renamed = {name.replace("/q_proj/", "/query/").replace("/k_proj/", "/key/"): value for name, value in exact.items()}
    nnx = {
        name.removeprefix(TARGET).replace("layers_", "layers/").replace("attention/", "attn/"): value
        for name, value in T5X.items()
    }
    for source, target in ((stored, renamed), (STORED, nnx)):
        for options in ({}, {"strict": False}):
            assert_equal(flatten(ot.restore(checkpoint(source), zeros(target), "auto", **options)), target)


@pytest.mark.parametrize("by_row", [False, True])
def test_scales_of_another_name_and_notes_beside_them_go_the_same_way(by_row):
    """`weight_scale`, for a weight or each of its rows, with `input_scale` and `comfy_quant`, which change nothing."""
    stored, exact = {}, dict(EXACT)
    for name, value in STORED.items():
        if name.endswith("scale_weight"):
            weight = name.removesuffix("scale_weight") + "weight"
            rows = STORED[weight].shape[0]
            scale = np.arange(1, rows + 1, dtype=np.float32) * value.reshape(()) if by_row else value
            exact[weight] = STORED[weight].astype(np.float32) * (scale[:, None] if by_row else scale)
            stored |= {f"{weight}_scale": scale, weight.removesuffix("weight") + "input_scale": np.float32(3)}
            stored[weight.removesuffix("weight") + "comfy_quant"] = np.zeros(27, np.uint8)
        elif name != "scaled_fp8":
            stored[name] = value
    wanted = t5x_of(exact, PLAIN)
    for transforms in ("auto", rules.hf_t5_to_t5x()):
        assert_equal(flatten(ot.restore(checkpoint(stored), zeros(wanted), transforms)), wanted)
    assert_equal(flatten(ot.restore(checkpoint(stored), zeros(exact), "auto")), exact)
    query = "encoder.block.1.layer.0.SelfAttention.q"
    unknown = {".weight_scale_inv": np.ones((2, 1), np.float32), ".quant_state.absmax": np.ones(3, np.float32)}
    unknown["_scale"] = np.float32(1)
    for options in ({}, {"strict": False}):
        for name, value in unknown.items():
            (problem,) = problems({**stored, query + name: value}, wanted, rules.hf_t5_to_t5x(), **options)
            assert problem.leaf == query + name and "strict" not in str(problem.fix), name


def test_scales_of_blocks_and_of_int8_rows_multiply():
    """DeepSeek's blocks by NumPy; bitsandbytes' values are its own dequantization, of version 0.50.2."""
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(300, 130)).astype(FLOAT8)
    scale = rng.uniform(1, 2, (3, 2)).astype(np.float32)
    exact = weight.astype(np.float32) * np.repeat(np.repeat(scale, 128, 0), 128, 1)[:300, :130]
    found = ot.restore(checkpoint({"m.weight": weight, "m.weight_scale_inv": scale}), None, PACK)
    assert_equal(found, {"m.weight": exact})
    # One scale for each 64 rows is another form, and so is one that fits no block.
    for shape in ((5, 3), (2, 2)):
        other = {"m.weight": weight, "m.weight_scale_inv": np.ones(shape, np.float32)}
        (problem,) = problems(other, None, PACK)
        assert problem.leaf == "m.weight" and str(shape) in problem.message and "Drop" not in str(problem.fix)
    path = GOLDENS / "quantized" / "bitsandbytes_int8"
    with np.load(path / "expected.npz") as expected:
        rows = dict(expected)
    found = ot.restore(path / "model.safetensors", None, PACK)
    assert found.keys() == rows.keys() and rows
    for name, value in rows.items():
        np.testing.assert_allclose(found[name], value, rtol=3e-7, err_msg=name)
    with ot.open_checkpoint(path / "model.safetensors") as opened:
        stored = {name: leaf.get() for name, leaf in opened.leaves.items()}
    turned = {**stored, "m.weight_format": np.uint8(2)}
    with pytest.raises(ValueError, match="weight_format is 2"):
        ot.restore(checkpoint(turned), None, PACK)
    # int8 with a zero beside it has another product.
    (problem,) = problems(
        {"m.weight": stored["m.weight"], "m.weight_scale": np.float32(1), "m.weight_zero_point": np.zeros(1, np.int8)},
        {"m.weight": np.ones((10, 24), np.float32)},
        PACK,
    )[:1]
    assert "m.weight" in problem.message and "Drop" not in str(problem.fix)
