"""Mesh TensorFlow's names become T5X's; T5X's own importer is the judge (`goldens/importer`)."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest

from orbax_t5x.errors import LeafMismatchError
from orbax_t5x.lazy import LazyThreadPoolArray, as_view
from orbax_t5x.mesh_tf.rules import t5_importer
from orbax_t5x.mesh_tf.translator import CheckpointTranslator
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.translate import Translate
from tests.support.mesh_tf_names import Unreadable, problems, translate, unreadable


def bundle(goldens, name):
    meta = json.loads((goldens / "tf_bundle" / name / "expected_meta.json").read_text())
    return {key: as_view(Unreadable(key, leaf["shape"], leaf["dtype"])) for key, leaf in meta["tensors"].items()}


def like(shapes):
    return {name: np.empty(shape, getattr(ml_dtypes, dtype, dtype)) for name, (shape, dtype) in shapes.items()}


def test_placeholders_are_zeros_and_notes_tell_the_rule(goldens):
    diagnostics = Diagnostics()
    result = Translate().apply(bundle(goldens, "t5_1_1_f32"), {}, diagnostics)
    kernel = "state/param_states/decoder/layers_0/self_attention/query/kernel"
    norm = "state/param_states/decoder/decoder_norm/scale"
    for name in (f"{kernel}/m", f"{kernel}/v", f"{norm}/m", f"{norm}/v_row", f"{norm}/v_col"):
        np.testing.assert_array_equal(result[name], np.zeros((1,), np.float32))
    assert diagnostics.rule_for[f"{kernel}/m"] == "Adafactor placeholder"
    assert "attention_layers" in diagnostics.rule_for[f"{kernel}/v_row"]
    assert "rel_embeddings" in diagnostics.rule_for["target/encoder/relpos_bias/rel_embedding"]
    assert set(diagnostics.rule_for) == set(result)


# The relative bias.

BIAS = "block_{:03d}/layer_000/SelfAttention/relative_attention_bias"


def tower(name, layers, biases):
    kernels = [f"{name}/block_{i:03d}/layer_000/SelfAttention/q" for i in range(layers)]
    return [*kernels, *(f"{name}/{BIAS.format(i)}{slot}" for i in biases for slot in ("", "_slot_v"))]


def biases(result):
    return sorted(name for name in result if "relpos" in name and name.startswith("target"))


def shared(name):
    return f"target/{name}/relpos_bias/rel_embedding"


def per_layer(name, layer):
    return f"target/{name}/layers_{layer}/relpos_bias/rel_embedding"


# Biases in the file by tower and block, in the target, and in the result.
SHARED, EACH = [shared("encoder")], [per_layer("encoder", layer) for layer in (0, 1)]
BIASES = {
    "only block 0": (tower("encoder", 3, [0]), [], SHARED),
    "every block": (tower("encoder", 2, [0, 1]), [], EACH),
    "each tower by itself": (
        tower("encoder", 1, [0]) + tower("decoder", 1, [0]),
        [per_layer("encoder", 0), shared("decoder")],
        [shared("decoder"), per_layer("encoder", 0)],
    ),
    "a target without a bias": (tower("encoder", 2, [0]), ["target/encoder/encoder/relpos_bias/rel_embedding"], SHARED),
    "shared in the file only": (tower("encoder", 2, [0]), EACH, SHARED),
    "shared in the target only": (tower("encoder", 2, [0, 1]), SHARED, EACH),
}


@pytest.mark.parametrize("case", BIASES)
def test_the_file_decides_unless_a_tower_has_one_layer(case):
    source, target, expected = BIASES[case]
    assert biases(translate(unreadable(source), dict.fromkeys(target, np.empty(())))) == expected


def test_a_one_layer_model_is_decided_by_the_target():
    source = unreadable(tower("decoder", 1, [0]))
    assert biases(translate(source)) == [shared("decoder")]
    for name in (shared("decoder"), per_layer("decoder", 0)):
        result = translate(source, {name: np.empty(()), **like({name + "/v": ((), "float32")})})
        assert biases(result) == [name]
        slot = name.replace("target", "state/param_states") + "/v"
        assert slot in result  # the slots go where the bias goes


# Placeholders.

EMBEDDING = "state/param_states/token_embedder/embedding"


def test_placeholders_only_where_the_target_has_them():
    source = unreadable(["shared/embedding", "shared/embedding_slot_vr", "shared/embedding_slot_vc"])
    target = {"target/token_embedder/embedding": np.empty(()), "state/param_states/0/mu/x": np.empty(3)}
    assert set(translate(source, target)) == {
        "target/token_embedder/embedding",
        f"{EMBEDDING}/v_row",
        f"{EMBEDDING}/v_col",
    }


def test_a_placeholder_has_the_dtype_of_the_targets():
    source = unreadable(["shared/embedding", "shared/embedding_slot_v"])
    target = {f"{EMBEDDING}/m": np.zeros((1,), ml_dtypes.bfloat16), f"{EMBEDDING}/v_row": ...}
    result = translate(source, target)
    assert result[f"{EMBEDDING}/m"].dtype == ml_dtypes.bfloat16
    assert result[f"{EMBEDDING}/v_row"].dtype == np.float32
    assert f"{EMBEDDING}/v_col" not in result


def test_momentum_is_not_invented():
    source = unreadable(["shared/embedding", "shared/embedding_slot_v"])
    assert f"{EMBEDDING}/m" not in translate(source, {f"{EMBEDDING}/m": np.zeros((8, 4), np.float32)})


def test_a_slot_that_the_file_lost_is_not_invented():
    result = translate(unreadable(["shared/embedding", "shared/embedding_slot_vr"]))
    assert set(result) == {"target/token_embedder/embedding", *(f"{EMBEDDING}/{slot}" for slot in ("v_row", "v", "m"))}


def test_a_bundle_without_slots_fills_what_the_target_keeps_unused():
    source = unreadable(["shared/embedding", "decoder/logits/kernel", "decoder/rms_norm/scale"])
    states = {
        # A factored moment, one kept whole, and none at all.
        "token_embedder/embedding": {"v_row": (4,), "v_col": (8,), "v": (1,), "m": (1,)},
        "decoder/logits_dense/kernel": {"v_row": (1,), "v_col": (1,), "v": (4, 8), "m": (4, 8)},
        "decoder/decoder_norm/scale": {"m": (1,)},
        "not/in/the/file": {"m": (1,)},
    }
    target = {
        f"state/param_states/{name}/{slot}": np.zeros(shape)
        for name, kept in states.items()
        for slot, shape in kept.items()
    }
    added = {name: value for name, value in translate(source, target).items() if name.startswith("state/")}
    assert added.keys() == {
        *(f"state/param_states/token_embedder/embedding/{slot}" for slot in ("v", "m")),
        *(f"state/param_states/decoder/logits_dense/kernel/{slot}" for slot in ("v_row", "v_col")),
        "state/param_states/decoder/decoder_norm/scale/m",
    }
    assert all(value.shape == (1,) and not np.any(value) for value in added.values())


def test_second_moments_of_one_element_are_not_invented():
    kept = {f"{EMBEDDING}/{slot}": np.zeros(1) for slot in ("v_row", "v_col", "v")}
    assert set(translate(unreadable({"shared/embedding": (1,)}), kept)) == {"target/token_embedder/embedding"}


def test_a_bundle_without_slots_gets_no_placeholders():
    assert set(translate(unreadable(["shared/embedding"]))) == {"target/token_embedder/embedding"}


# The step.


def test_the_step_narrows_when_it_fits_and_says_so_when_it_does_not():
    step = translate({"global_step": as_view(np.int64(1_000_000), name="global_step")})["state/step"]
    assert step.dtype == np.int32
    assert step.get() == 1_000_000
    too_late = translate({"global_step": as_view(np.int64(2**40), name="global_step")})["state/step"]
    with pytest.raises(LeafMismatchError, match=r"global_step.*1099511627776"):
        too_late.get()
    assert t5_importer.apply({"global_step": np.int64(7)})["state/step"].dtype == np.int32
    with pytest.raises(ValueError, match="does not fit"):
        t5_importer.apply({"global_step": np.int64(2**40)})


def test_lazy_arrays_of_get_fn_stay_their_kind():
    lazy = LazyThreadPoolArray((), np.int64, lambda: np.int64(5))
    step = t5_importer.apply({"global_step": lazy})["state/step"]
    assert type(step) is LazyThreadPoolArray
    assert step.get() == np.int32(5)


# Problems, the protocol of transforms.


def test_all_problems_are_gathered():
    source = unreadable(
        [
            *(f"other/variable_{i}" for i in range(30)),
            "encoder/block_000/layer_007/layer_norm/scale",
            "encoder/block_000/layer_000/SelfAttention/q",
            "encoder/block_000/layer_001/SelfAttention/q",  # lands on the same name
        ]
    )
    sublayer, collision, unmatched = problems(source)
    assert sublayer.leaf == "encoder/block_000/layer_007/layer_norm/scale"
    assert collision.leaf == "encoder/block_000/layer_001/SelfAttention/q"
    assert "encoder/block_000/layer_000/SelfAttention/q" in collision.message
    assert unmatched.leaf is None
    assert "30 of 33 names" in unmatched.message
    assert "'other/variable_0'" in unmatched.message
    assert "10 more" in unmatched.message
    assert "Drop" in str(unmatched.fix)


# Translators of the caller's own.


def two_rules():
    translator = CheckpointTranslator()

    @translator.add(r"layer(\d+)/(w|b)|top/(w)")
    def layers(opts, key, val, number, name, top):
        return (f"{opts.get('root', 'x')}/{number}/{name}", val) if number else (f"top/{top}", val)

    @translator.add(r".*_unused")
    def unused(opts, key, val):
        return None, val

    return translator


def test_apply():
    result = two_rules().apply({"layer3/w": 1, "top/w": 2, "a_unused": 3}, root="y")
    assert result == {"y/3/w": 1, "top/w": 2}
    assert list(result) == ["y/3/w", "top/w"]


def test_a_pattern_matches_whole_names():
    # `re.match` would take each of these, the alternatives of `|` in particular.
    for name in ("layer3/wx", "xlayer3/w", "top/w2", "xtop/w", "layer3/w\n"):
        with pytest.raises(ValueError, match="no translation rule"):
            two_rules().apply({name: 1})


def test_the_first_rule_decides():
    translator = two_rules()

    @translator.add(r"layer.*")
    def never(opts, key, val):
        raise AssertionError

    assert translator.apply({"layer1/b": 1}) == {"x/1/b": 1}


def test_errors_list_names_and_never_arrays():
    with pytest.raises(ValueError, match=r"2 names: 'p', 'q'") as caught:
        two_rules().apply({"p": np.full(3, 7.25), "q": np.full(3, 7.25), "layer1/w": 0})
    assert "7.25" not in str(caught.value)


def test_two_sources_on_one_name_are_an_error():
    with pytest.raises(ValueError, match=r"'layer01/w'") as caught:
        translator = CheckpointTranslator()
        translator.add(r"layer(\d+)/w")(lambda opts, key, val, number: (f"l{int(number)}", val))
        translator.apply({"layer1/w": 1, "layer01/w": 2})
    assert "'layer1/w'" in str(caught.value)
    assert "'l1'" in str(caught.value)
