"""Layers in blocks, mapped modules, and dimensions of 1: what is only another shape becomes transforms."""

import numpy as np
import pytest

import orbax_t5x as ot
from tests.support.aligned_leaves import wrong_leaves

LEAVES = {
    "self_attn.q_proj": ("self_attention/query/kernel", (6, 8)),
    "mlp.up_proj": ("mlp/up/kernel", (9, 8)),
    "input_layernorm": ("pre_self_attention_norm/scale", (8,)),
}


def blocks(depth, size, axis):
    """A decoder in layers, and the same in scanned blocks of several with a rest."""
    rng = np.random.default_rng(depth)
    source = {f"model.layers.{i}.{old}.weight": rng.normal(size=LEAVES[old][1]) for i in range(depth) for old in LEAVES}
    target = {}
    for old, (new, _) in LEAVES.items():
        layers = [source[f"model.layers.{i}.{old}.weight"].T for i in range(depth)]
        whole = depth - depth % size
        for place in range(size):
            target[f"decoder/layers/layers_{place}/{new}"] = np.stack(layers[place:whole:size], axis)
        target |= {f"decoder/rest/layers_{at}/{new}": layer for at, layer in enumerate(layers[whole:])}
    return source, target


@pytest.mark.parametrize(("depth", "size"), [(26, 6), (12, 3), (7, 2)])
@pytest.mark.parametrize("axis", [0, 1])
def test_blocks_of_layers_are_found_there_and_back(depth, size, axis):
    both = blocks(depth, size, axis)
    for source, target in (both, both[::-1]):
        alignment = ot.rules.align(source, target)
        assert alignment.is_complete and not wrong_leaves(alignment, source, target)
        assert len(alignment.transforms) < 10


@pytest.mark.parametrize(("old", "new"), [(0, 0), (0, 1), (1, 0)])
@pytest.mark.parametrize("is_square", [False, True])
def test_layers_on_an_axis_of_both_sides_are_transposed_as_the_layers_are(old, new, is_square):
    rng = np.random.default_rng(0)
    leaves = {"attn.q_proj": (4, 4), "mlp.up_proj": (4, 4 if is_square else 9), "norm": (4,)}
    layers = {name: rng.normal(size=(3, *shape)) for name, shape in leaves.items()}
    source = {f"blocks.stacked.{name}.weight": np.moveaxis(value, 0, old) for name, value in layers.items()}
    words = {"attn.q_proj": "attention/query/kernel", "mlp.up_proj": "mlp/up/kernel", "norm": "norm/scale"}
    target = {
        f"decoder/layers/{words[name]}": np.moveaxis(np.swapaxes(value, 1, -1) if value.ndim > 2 else value, 0, new)
        for name, value in layers.items()
    }
    for ours, theirs in ((source, target), (target, source)):
        alignment = ot.rules.align(ours, theirs)
        assert not wrong_leaves(alignment, ours, theirs)
        assert len(alignment.open) == (2 if is_square else 0)


def mapped():
    rng = np.random.default_rng(0)
    stacked = {"VmapDense_0/kernel": rng.normal(size=(3, 4, 5)), "VmapDense_0/bias": rng.normal(size=(3, 5))}
    single = {f"Dense_{i}/{name}": stacked[f"VmapDense_0/{name}"][i] for i in range(3) for name in ("kernel", "bias")}
    head = {"out/kernel": rng.normal(size=(5, 2))}
    return stacked | head, single | head


def with_ones():
    plain = {"a/q/kernel": np.arange(20.0).reshape(4, 5), "a/k/kernel": np.ones((4, 6))}
    return {**plain, "a/q/kernel": plain["a/q/kernel"][None]}, {n.replace("a/", "b/"): v for n, v in plain.items()}


@pytest.mark.parametrize("make", [mapped, with_ones])
def test_mapped_modules_and_dimensions_of_1_are_found_there_and_back(make):
    for source, target in (make(), make()[::-1]):
        alignment = ot.rules.align(source, target)
        assert alignment.is_complete and not wrong_leaves(alignment, source, target)


def test_a_leaf_with_one_candidate_in_its_module_is_taken():
    source = {"norm/w": np.zeros(4), "emb": np.zeros((6, 4))}
    assert ot.rules.align(source, {"norm/scale": np.zeros(4), "embedding": np.zeros((6, 4))}).is_complete
    assert ot.rules.align({"params/weight": np.zeros((4, 3))}, {"params/w": np.zeros((4, 3))}).is_complete


def test_a_reversed_namesake_is_asked_about_as_a_transposition():
    alignment = ot.rules.align(
        {"a/w": np.zeros((2, 3)), "a/v": np.zeros(7)}, {"a/w": np.zeros((3, 2)), "a/v": np.zeros(7)}
    )
    assert alignment.open == {"a/w": ("a/w",)} and "Transpose" in alignment._moves.why["a/w"]
