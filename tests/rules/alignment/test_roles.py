"""Roles of modules: the parts of a transformer around a module show its role, and no number or word alone."""

import pytest

from orbax_t5x.rules.alignment.roles import roles_of

EMBED, HIDDEN, VOCABULARY = 4, 9, 11
ATTENTION = {f"self_attn/{name}/kernel": (EMBED, 6) for name in ("q_proj", "k_proj", "v_proj")}
ATTENTION |= {"self_attn/o_proj/kernel": (6, EMBED)}
CROSS = {name.replace("self_attn", "multihead_attn"): shape for name, shape in ATTENTION.items()}
MLP = {"fc1/kernel": (EMBED, HIDDEN), "fc2/kernel": (HIDDEN, EMBED)}


def norms(*names):
    return {f"{name}/scale": (EMBED,) for name in names}


def roles(role, leaves, outside=()):
    """Roles by names, of a layer and of leaves outside."""
    names = [(("h", "#", *name.split("/")), shape) for name, shape in leaves.items()]
    names += [(tuple(name.split("/")), shape) for name, shape in dict(outside).items()]
    return {"/".join(node).removeprefix("h/#/"): word for node, word in roles_of(names)[role].items()}


FIRST, CROSSED, LAST = "pre_attention_layer_norm", "pre_cross_attention_layer_norm", "pre_mlp_layer_norm"


@pytest.mark.parametrize(
    ("first", "last"),
    [
        ("norm_1", "norm_2"),
        ("LayerNorm_0", "LayerNorm_1"),
        ("layer_norm", "layer_norm_1"),
        ("layer_norm", "final_layer_norm"),
        ("input_layernorm", "post_attention_layernorm"),
        ("post_attention_norm", "post_mlp_norm"),
        ("layernorm_before", "layernorm_after"),
        ("sa_norm", "output_layer_norm"),
        ("self_attn/layernorm", "norm"),
    ],
)
def test_two_norms_of_a_layer_are_those_of_attention_and_mlp(first, last):
    assert roles("norm", {**ATTENTION, **MLP, **norms(last, first)}) == {first: FIRST, last: LAST}


def test_a_second_attention_is_that_to_the_encoder_and_its_norm_the_second():
    layer = {**ATTENTION, **CROSS, **MLP, **norms("norm_1", "norm_2", "norm_3")}
    assert roles("norm", layer) == {"norm_1": FIRST, "norm_2": CROSSED, "norm_3": LAST}
    assert roles("attention", layer)["multihead_attn"] == "encoder_decoder_attention"


def test_a_norm_in_a_numbered_module_is_that_of_its_sublayer():
    layer = {f"layer_0/{name}": shape for name, shape in ATTENTION.items()}
    layer |= {f"layer_1/{name}": shape for name, shape in MLP.items()} | norms(
        "layer_0/layer_norm", "layer_1/layer_norm"
    )
    assert roles("norm", layer) == {"layer_0/layer_norm": FIRST, "layer_1/layer_norm": LAST}


@pytest.mark.parametrize(
    "leaves",
    [
        {**MLP, **norms("norm_1", "norm_2")},
        {**ATTENTION, **MLP, **norms("norm_1", "norm_2", "norm_3", "norm_4")},
        {**ATTENTION, **MLP, **norms("norm_2", "norm_3")},
        {**ATTENTION, **MLP, **norms("norm_1")},
        {**ATTENTION, **MLP, **norms("foo_norm", "bar_norm")},
        {**ATTENTION, "mystery/kernel": (EMBED, 5), "other/kernel": (3, EMBED), **norms("norm")},
        {**ATTENTION, "moe/router/kernel": (EMBED, 5), **norms("moe_norm")},
    ],
)
def test_norms_of_other_layers_have_no_roles(leaves):
    assert roles("norm", leaves) == {}


@pytest.mark.parametrize(
    ("gate", "up", "down"),
    [("w_1", "w_3", "w_2"), ("fc_1", "fc_2", "proj"), ("gate", "fc1", "fc2"), ("wi_0", "wi_1", "wo"), ("x", "up", "y")],
)
def test_the_gate_of_an_mlp_is_known_by_its_word_or_its_number(gate, up, down):
    shapes = {gate: (EMBED, HIDDEN), up: (EMBED, HIDDEN), down: (HIDDEN, EMBED)}
    found = roles("mlp", {f"mlp/{name}/kernel": shape for name, shape in shapes.items()})
    assert found == {f"mlp/{gate}": "wi_0", f"mlp/{up}": "wi_1", f"mlp/{down}": "wo"}


@pytest.mark.parametrize("names", [("Dense_0", "Dense_1", "Dense_2"), ("x", "y", "z")])
def test_numbers_of_flax_and_unknown_words_show_no_gate(names):
    shapes = zip(names, [(EMBED, HIDDEN), (EMBED, HIDDEN), (HIDDEN, EMBED)], strict=True)
    assert roles("mlp", {f"mlp/{name}/kernel": shape for name, shape in shapes}) == {}
    assert roles("mlp", {f"mlp/{name}/kernel": (EMBED, EMBED) for name in names[:2]}) == {}


@pytest.mark.parametrize("shape", [(EMBED, HIDDEN), (EMBED, EMBED)])
def test_a_gate_and_its_input_are_no_input_and_output(shape):
    """The output may be left out."""
    assert roles("mlp", {"mlp/gate_proj/kernel": shape, "mlp/up_proj/kernel": shape}) == {}
    assert roles("mlp", {"mlp/up_proj/kernel": (EMBED, HIDDEN), "mlp/x/kernel": (EMBED, HIDDEN)}) == {}


def test_tables_and_their_inverse_are_known_beside_layers():
    layer = {**ATTENTION, **MLP}
    table, back = {"Embed_0/embedding": (VOCABULARY, EMBED)}, {"Dense_0/kernel": (EMBED, VOCABULARY)}
    pos = {"pos/embedding": (7, EMBED)}
    assert roles("table", layer, {**table, **back, **pos}) == {
        "Embed_0": "token_embedder", "Dense_0": "logits_dense", "pos": "position_embedding"
    }  # fmt: skip
    assert roles("table", layer, back) == {} and roles("table", {}, {**table, **back}) == {}
    # A new head of the shape is no inverse of the table.
    assert roles("table", layer, {**table, "new_head/kernel": (EMBED, VOCABULARY)}) == {}
    assert roles("end", layer, norms("RMSNorm_0")) == {"RMSNorm_0": "final_layer_norm"}
    assert roles("end", layer, norms("encoder/norm", "decoder/after_norm")).keys() == {
        "encoder/norm",
        "decoder/after_norm",
    }
    assert roles("end", layer, norms("norm_a", "norm_b")) == {}
