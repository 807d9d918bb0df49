"""Paths of names, and words of one meaning."""

import pytest

from orbax_t5x.rules.alignment.words import contradict, features, is_flat, meaning_of, path_of, says_little


@pytest.mark.parametrize(
    "name",
    [
        "decoder/layers_3/wi_0",
        "decoder.layers.3.wi.0",
        "decoder/layers/03/wi_0",
        "decoder__layers-3__wi0",
        "decoder:layers3:wi_0",
    ],
)
def test_names_with_other_separators_have_one_path(name):
    assert path_of(name) == ("decoder", "layers", 3, "wi", 0)


def test_words_with_digits_inside_stay_whole():
    assert path_of("T5LayerNorm_0/conv2d/fp8") == ("T5LayerNorm", 0, "conv2d", "fp", 8)
    assert path_of("block_3_attn/w") == ("block", 3, "attn", "w")
    assert path_of("h_0_mlp_wi", is_flat=True) == ("h", 0, "mlp", "wi")


def test_a_name_of_many_parts_is_no_deep_path():
    path = path_of("/".join("ab" * 500))
    assert len(path) == 64 and path[-1] == "/".join("ab" * 500)[2 * 63 :]


def test_flat_names_have_no_separator_but_underscores():
    assert is_flat(["a_b", "c"]) and not is_flat(["a_b", "c/d"]) and not is_flat(["a__b"])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("q_proj", "query"),
        ("SelfAttention", "attn"),
        ("DenseReluDense", "mlp"),
        ("Enc", "encoder"),
        ("ln_f", "final_layer_norm"),
    ],
)
def test_words_of_one_meaning(one, other):
    assert meaning_of(one) == meaning_of(other) and features([one], 1) & features([other], 1)


def test_known_words_contradict_each_other_and_unknown_ones_nothing():
    assert contradict(["encoder"], ["decoder"]) and contradict(["key", "kernel"], ["q", "kernel", "value"])
    assert (
        not contradict(["encoder"], ["foo"])
        and not contradict(["wo"], ["out"])
        and not contradict(["weight"], ["scale"])
    )
    assert contradict(["bias"], ["scale"])


def test_words_for_any_array_say_little():
    assert all(map(says_little, ("kernel", "weight", "scale"))) and not says_little("bias")


def test_single_words_are_the_last_evidence():
    assert features(["pre_mlp_layer_norm"], 2) == {"pre_mlp", "norm"}
    assert features(["pre_mlp_layer_norm"], 0) == {"pre_mlp_layer_norm"}
