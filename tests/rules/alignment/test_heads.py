"""Heads of attentions in each layout, fused projections, and the bias of positions that the first layer has for all."""

import itertools

import numpy as np
import pytest

import orbax_t5x as ot
from tests.support.aligned_leaves import wrong_leaves

WIDTH, SIZE, HIDDEN, DEPTH = 8, 4, 10, 3
# Of a query, key or value [width, heads, size], of an output [heads, size, width], and of a matrix of an MLP.
LAYOUTS = {
    "width first": (lambda a: a, lambda a: a, lambda a: a),
    "heads first": (lambda a: a.swapaxes(0, 1), lambda a: a, lambda a: a),
    "width last": (lambda a: np.moveaxis(a, 0, 2), lambda a: np.moveaxis(a, 2, 0), np.transpose),
    "matrix": (lambda a: a.reshape(len(a), -1), lambda a: a.reshape(-1, a.shape[-1]), lambda a: a),
    "pytorch": (lambda a: a.reshape(len(a), -1).T, lambda a: a.reshape(-1, a.shape[-1]).T, np.transpose),
}
NAMES = {
    True: "h.{}.attn.q.weight h.{}.attn.k.weight h.{}.attn.v.weight h.{}.attn.o.weight h.{}.mlp.up.weight "
    "h.{}.mlp.down.weight h.{}.attn_norm.weight h.{}.mlp_norm.weight wte.weight",
    False: "layers/{}/attention/query/kernel layers/{}/attention/key/kernel layers/{}/attention/value/kernel "
    "layers/{}/attention/out/kernel layers/{}/mlp/wi/kernel layers/{}/mlp/wo/kernel "
    "layers/{}/pre_attention_norm/scale layers/{}/pre_mlp_norm/scale token_embedder/embedding",
}


def model(layout, *, is_source, heads, shared, has_biases=False, axis=None, depth=DEPTH):
    inputs, output, other = LAYOUTS[layout]
    found = {}
    shapes = [(WIDTH, heads, SIZE), (WIDTH, shared, SIZE), (WIDTH, shared, SIZE), (heads, SIZE, WIDTH)]
    shapes += [(WIDTH, HIDDEN), (HIDDEN, WIDTH), (WIDTH,), (WIDTH,), (13, WIDTH)]
    for at, (name, shape) in enumerate(zip(NAMES[is_source].split(), shapes, strict=True)):
        change = [inputs] * 3 + [output] + [other] * 2 + [lambda a: a] * 3
        values = [np.random.default_rng([at, layer]).normal(size=shape) for layer in range(depth)]
        values = [np.ascontiguousarray(change[at](value)) for value in values]
        biases = [np.random.default_rng([at, layer, 1]).normal(size=shape[1:]) for layer in range(depth)]
        biases = [one if len(values[0].shape) == 3 else one.reshape(-1) for one in biases]
        kinds = [(name, values)] + [(name.replace("kernel", "bias").replace("weight", "bias"), biases)] * (
            has_biases and at < 3
        )
        for text, some in kinds:
            if "{}" not in text:
                found[text] = some[0]
            elif axis is None:
                found |= {text.format(layer): one for layer, one in enumerate(some)}
            else:
                found[text.replace("/{}", "").replace(".{}", "")] = np.stack(some, min(axis, some[0].ndim))
    return found


@pytest.mark.parametrize("layouts", list(itertools.permutations(LAYOUTS, 2)), ids=" to ".join)
@pytest.mark.parametrize(("heads", "shared"), [(3, 3), (3, 1), (2, 2), (4, 2)])
def test_heads_are_split_and_joined_in_each_layout(layouts, heads, shared):
    """Half of the layouts have biases where keys and values have fewer heads, the others where they have as many."""
    has_biases = (list(itertools.permutations(LAYOUTS, 2)).index(layouts) + (heads == shared)) % 2 == 0
    source, target = (
        model(layout, is_source=at == 0, heads=heads, shared=shared, has_biases=has_biases)
        for at, layout in enumerate(layouts)
    )
    alignment = ot.rules.align(source, target)
    assert not wrong_leaves(alignment, source, target)
    back = alignment.inverse()
    assert alignment.is_complete and back.is_complete and not wrong_leaves(back, target, source)


@pytest.mark.parametrize("layouts", [("pytorch", "width first"), ("heads first", "matrix"), ("width first",) * 2])
@pytest.mark.parametrize("axes", [(None, 0), (None, 1), (0, None), (1, 0), (0, 1)])
@pytest.mark.parametrize("heads", [2, 3])
def test_heads_are_no_layers_and_layers_on_an_axis_keep_their_heads(layouts, axes, heads):
    source, target = (
        model(layout, is_source=at == 0, heads=heads, shared=heads, axis=axes[at]) for at, layout in enumerate(layouts)
    )
    alignment = ot.rules.align(source, target)
    assert alignment.is_complete and not wrong_leaves(alignment, source, target)


@pytest.mark.parametrize("layouts", list(itertools.permutations(LAYOUTS, 2)), ids=" to ".join)
def test_as_many_heads_as_layers_are_no_layers(layouts):
    """Nothing but its place tells a dimension of heads from one of layers."""
    source, target = (model(layout, is_source=at == 0, heads=DEPTH, shared=DEPTH) for at, layout in enumerate(layouts))
    alignment = ot.rules.align(source, target)
    assert alignment.is_complete and not wrong_leaves(alignment, source, target)


def test_outputs_that_lie_as_inputs_do_are_asked_about():
    """Without outputs of the usual layout nothing shows how a square matrix lies."""
    source = model("pytorch", is_source=True, heads=2, shared=2)
    target = model("width first", is_source=False, heads=2, shared=2)
    for name in [name for name in target if "/out/" in name]:
        target[name] = np.moveaxis(target[name], 2, 0)
    alignment = ot.rules.align(source, target)
    assert not wrong_leaves(alignment, source, target)
    assert {name.split("/")[3] for name in alignment.open} == {"query", "key", "value", "out"}


def test_another_number_of_heads_is_another_array():
    source = model("heads first", is_source=True, heads=2, shared=2)
    target = model("width first", is_source=False, heads=2, shared=2)
    target = {name: value.reshape(8, 4, 2) if "query" in name else value for name, value in target.items()}
    alignment = ot.rules.align(source, target)
    assert {name for name in alignment.open if "attention" in name} >= {
        f"layers/{at}/attention/query/kernel" for at in range(3)
    }
    assert not wrong_leaves(alignment, source, target)


FUSED = [
    "attn.qkv.weight",
    "attn.c_attn.weight",
    "attention.query_key_value.weight",
    "attn.Wqkv.weight",
    "attn.linear_qkv.weight",
    "attn.unknown.weight",
]


@pytest.mark.parametrize("names", list(itertools.permutations(FUSED, 2)))
def test_fused_projections_are_one_only_in_the_same_arrangement(names):
    """By heads or in turn, the shape is the same."""
    rng = np.random.default_rng(0)
    rest = {"h.{}.ln_1.weight": (8,), "h.{}.ln_2.weight": (8,), "h.{}.mlp.fc.weight": (10, 8)}
    layers = {f"h.{i}.{names[0]}": rng.normal(size=(24, 8)) for i in range(2)}
    source = layers | {name.format(i): rng.normal(size=shape) for i in range(2) for name, shape in rest.items()}
    target = {name.replace(names[0], names[1]): value for name, value in source.items()}
    alignment = ot.rules.align(source, target)
    turns = [name in FUSED[:2] for name in names]
    by_heads = [name in (FUSED[2], FUSED[4]) for name in names]
    assert bool(alignment.open) != (all(turns) or all(by_heads))


@pytest.mark.parametrize("name", ["attn.my_qkv.weight", "attn.query_then_value.weight"])
@pytest.mark.parametrize("other", [FUSED[0], FUSED[2]])
def test_a_strangers_fused_projection_is_only_its_namesake(name, other):
    rest = {"h.0.ln_1.weight": np.ones(8), "h.0.mlp.fc.weight": np.ones((10, 8))}
    ours, theirs = ({f"h.0.{one}": np.ones((24, 8)), **rest} for one in (name, other))
    for source, target in ((ours, theirs), (theirs, ours)):
        assert len(ot.rules.align(source, target).open) == 1
    below = {f"model.{one}": value for one, value in ours.items()}
    assert ot.rules.align(ours, below).is_complete


@pytest.mark.parametrize("is_back", [False, True])
@pytest.mark.parametrize("axis", [None, 1])
def test_a_position_bias_of_the_first_layer_is_that_of_all(is_back, axis):
    first = model("matrix", is_source=False, heads=3, shared=3)
    other = model("width first", is_source=False, heads=3, shared=3, axis=axis)
    other = {name.replace("layers", "decoder/layers"): value for name, value in other.items()}
    first["layers/0/attention/relative_attention_bias/embedding"] = np.random.default_rng(7).normal(size=(32, 3))
    other["decoder/relpos_bias/rel_embedding"] = first["layers/0/attention/relative_attention_bias/embedding"].T
    source, target = (other, first) if is_back else (first, other)
    alignment = ot.rules.align(source, target)
    assert alignment.is_complete and not wrong_leaves(alignment, source, target)
