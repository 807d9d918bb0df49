"""Moves stand only with a proof: the search may find what it will, no leaf gets another's values."""

import numpy as np
import pytest

import orbax_t5x as ot
from tests.support.aligned_leaves import applied, wrong_leaves

SQUARE, VECTOR = (4, 4), (4,)


def tree(shapes):
    return {name: np.random.default_rng(at).normal(size=shape) for at, (name, shape) in enumerate(shapes.items())}


def open_leaves(source, target):
    return set(ot.rules.align(tree(source), tree(target)).open)


def moved(prefixes, form):
    """Two towers alike; the second has one module more, or the first."""
    first, second = prefixes
    return {
        form.format(tower=tower, module=module): shape
        for tower, modules in ((first, ("x/kernel", "n/scale")), (second, ("x/kernel", "y/kernel", "n/scale")))
        for module in modules
        for shape in [VECTOR if module[0] == "n" else SQUARE]
    }


def test_equal_names_outvote_structure():
    """A module moved between towers that are alike else."""
    source, target = moved("ab", "{tower}/{module}"), moved("ba", "{tower}/{module}")
    assert open_leaves(source, target) == {"a/y/kernel"}
    alignment = ot.rules.align(tree(source), tree(target))
    assert alignment.open["a/y/kernel"][0] == "b/y/kernel" and alignment.transforms == ()


def test_towers_keep_their_words_though_layers_are_renamed():
    source, target = (
        moved(towers, f"{{tower}}/{layers}/{{module}}") for towers, layers in (("pq", "layers_0"), ("qp", "blocks/0"))
    )
    for found in ot.rules.align(tree(source), tree(target))._moves.values():
        assert found.sources[0][0] == found.targets[0][0]
    source = {f"{tower}/h/{i}/w/kernel": SQUARE for tower, depth in (("left", 2), ("right", 3)) for i in range(depth)}
    target = {
        f"{tower}/layers_{i}/w/kernel": SQUARE for tower, depth in (("left", 3), ("right", 2)) for i in range(depth)
    }
    assert open_leaves(source, target) == target.keys()


@pytest.mark.parametrize("last", [("weight", "w"), ("weight", "kernel"), ("weight", "weight")])
def test_square_matrices_lie_as_those_beside_them(last):
    """Without any that are not square nothing shows how they lie."""
    old, new = last
    source = {f"layers.{i}.{module}.{old}": SQUARE for i in range(2) for module in ("query", "key")}
    target = {f"layers_{i}/{module}/{new}": SQUARE for i in range(2) for module in ("query", "key")}
    assert open_leaves(source, target) == target.keys()
    for size, is_turned in (((9, 4), False), ((9, 4), True)):
        beside = {f"layers.{i}.mlp.{old}": size for i in range(2)}
        its = {f"layers_{i}/mlp/{new}": size[::-1] if is_turned else size for i in range(2)}
        ours, theirs = tree({**source, **beside}), tree({**target, **its})
        names = dict(zip(theirs, ours, strict=True))
        truth = {name: ours[old].T if is_turned and ours[old].ndim == 2 else ours[old] for name, old in names.items()}
        assert not wrong_leaves(ot.rules.align(ours, theirs), ours, truth)


def test_a_table_and_a_matrix_of_one_shape_are_two_questions():
    source = {"tok.weight": SQUARE, "fc.weight": SQUARE, "fc.bias": VECTOR}
    assert open_leaves(source, {"tok/embedding": SQUARE, "fc/kernel": SQUARE, "fc/bias": VECTOR}) == {
        "tok/embedding",
        "fc/kernel",
    }


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (("w1", "w2", "w3"), ("Dense_0", "Dense_1", "Dense_2")),
        (("linears.0", "linears.1"), ("Dense_0", "Dense_1")),
        (("norm_1", "norm_2"), ("LayerNorm_0", "LayerNorm_1")),
    ],
)
def test_numbers_of_unlike_modules_are_no_order(old, new):
    source, target = (
        {
            f"{layers}/{i}/ff/{module}/{kind}": shape
            for i in range(2)
            for module in modules
            for kind, shape in (("kernel", SQUARE), ("bias", VECTOR))
        }
        for layers, modules in (("h", old), ("block", new))
    )
    assert open_leaves(source, target) == target.keys()


@pytest.mark.parametrize("kept", ["body/l", "body/layers_0/mlp/wi"])
@pytest.mark.parametrize("left", ["ema/body/l2/w", "old_head/kernel", "head/a/kernel"])
def test_a_new_head_takes_no_leaf_that_is_left_over(kept, left):
    body = {f"{kept}/kernel": (4, 5), f"{kept}/bias": (5,)}
    assert open_leaves({**body, left: SQUARE}, {**body, "new_one/kernel": SQUARE}) == {"new_one/kernel"}
    both = {f"{left.rpartition('/')[0]}/{kind}": shape for kind, shape in (("kernel", SQUARE), ("bias", VECTOR))}
    head = {"new_one/kernel": SQUARE, "new_one/bias": VECTOR}
    assert open_leaves({**body, **both}, {**body, **head}) == head.keys()


def test_a_word_or_the_module_around_is_enough():
    body = {"norm/scale": (9,)} | {
        f"layers_{i}/{name}/kernel": (2, 3 + at) for i in range(2) for at, name in enumerate(("query", "key", "value"))
    }
    source, target = ({**body, **{f"layers_{i}/{name}/kernel": (7, 7) for i in range(2)}} for name in ("foo", "bar"))
    assert open_leaves(source, target) == set()


def test_each_open_leaf_has_its_reason():
    source = {f"h/{i}/{name}/kernel": (4, 5) for i in range(2) for name in ("a", "c")}
    target = {f"h/{i}/{name}/kernel": (4, 5) for i in range(2) for name in ("x", "y")}
    moves = ot.rules.align(tree(source), tree(target))._moves
    assert moves.open["h/1/x/kernel"] == ("h/1/a/kernel", "h/1/c/kernel")


def test_transforms_of_an_incomplete_alignment_run():
    """A leaf that stays open keeps its name, which no other leaf is given."""
    source = {"decoder/final/scale": (4,), "dense/final/scale": (5,), "dense/final": (2, 3), "w/kernel": (4, 6)}
    target = {"decoder/final/scale": (5,), "head/final/scale": (4,), "w/w": (4, 6)}
    for ours, theirs in ((source, target), (target, source)):
        alignment = ot.rules.align(tree(ours), tree(theirs))
        assert applied(alignment.transforms, tree(ours))


@pytest.mark.parametrize(("last", "is_open"), [("net_bias", False), ("head_bias", True), ("bias_net_out", True)])
def test_a_change_of_words_is_proven_by_other_leaves_of_the_module(last, is_open):
    source = {"target/wide": (8, 16), "target/tall": (24, 8), "target/bias": (5,)}
    target = {"params/net_wide": (8, 16), "params/net_tall": (24, 8), f"params/{last}": (5,)}
    assert open_leaves(source, target) == ({f"params/{last}"} if is_open else set())


# In each the second tower of the target has a module that is new or moved, and shares a word with one that is left out:
# modules of the towers in the source and in the target, and what may be known of the target.
ALIKE = {
    "a new one of the same meaning": (({"dense", "up"}, {"dense", "up"}), ({"dense", "rel"}, {"dense", "rel", "w1"})),
    "a moved one of the same meaning": (
        ({"attn", "ff", "ffn"}, {"attn", "ff"}),
        ({"attn", "rel"}, {"attn", "rel", "ffn"}),
    ),
    "a moved one with a word of it": (({"y", "fc1", "fc1n"}, {"y", "fc1"}), ({"y", "ron"}, {"y", "ron", "fc1n"})),
}


@pytest.mark.parametrize("towers", [("encoder", "decoder"), ("net1", "net2"), ("policy", "value_net")])
@pytest.mark.parametrize("case", ALIKE)
def test_words_in_alike_towers_prove_nothing_of_new_modules(case, towers):
    source, target = (
        {
            f"{tower}/{layers}/{module}/{last}": VECTOR if module not in ("attn", "dense", "y") else SQUARE
            for tower, modules in zip(towers, sides, strict=True)
            for module in modules
            for last in ("scale", "bias")
        }
        for sides, layers in zip(ALIKE[case], ("layer_0", "block0"), strict=True)
    )
    (new,) = ALIKE[case][1][1] - ALIKE[case][1][0]
    found = ot.rules.align(tree(source), tree(target))
    assert {name for name in target if f"/{new}/" in name} <= found.open.keys()
    assert any(f"/{module}/" in name for name in found._moves for module in ("attn", "dense", "y"))
