"""Leaves are paired as far as there is one reading."""

from orbax_t5x.rules.alignment.match import LeafPairing
from tests.support.aligned_leaves import items


def paired(ours, theirs):
    """Pairs by name, and the names of leaves that stay open with their readings."""
    pairing = LeafPairing(items(ours), items(theirs))
    readings = {item.names[0]: sorted(one.names[0] for one in found) for item, found in pairing.open.items()}
    return {one.names[0]: other.names[0] for one, other in pairing.pairs}, readings


def test_shapes_then_structure_then_names_decide():
    ours = {"x/a": (2,), "x/b": (3,), "y/c/d": (2,), "y/c/e": (4,), "y/f": (3,), "z/g": (4,)}
    theirs = {"p/a": (2,), "p/b": (3,), "q/c/d": (2,), "q/c/e": (4,), "q/f": (3,), "r/g": (4,)}
    pairs, readings = paired(ours, theirs)
    assert readings == {} and pairs == dict(zip(ours, theirs, strict=True))


def test_what_is_alike_is_told_by_names_and_the_last_by_exclusion():
    ours = {f"{name}/w": (2, 2) for name in ("query", "key", "foo")}
    assert paired(ours, {f"{name}/w": (2, 2) for name in ("q", "k", "bar")})[0] == {
        "query/w": "q/w",
        "key/w": "k/w",
        "foo/w": "bar/w",
    }
    pairs, readings = paired(ours, {f"{name}/w": (2, 2) for name in ("q", "x", "bar")})
    assert pairs == {"query/w": "q/w"} and readings == {name: ["foo/w", "key/w"] for name in ("x/w", "bar/w")}


def test_towers_of_one_structure_are_told_by_names_inside():
    ours = {"a/enc_norm": (3,), "a/w": (2, 2), "b/dec_norm": (3,), "b/w": (2, 2)}
    assert paired(ours, {name.replace("a/", "r/").replace("b/", "s/"): shape for name, shape in ours.items()})[0] == {
        "a/enc_norm": "r/enc_norm",
        "a/w": "r/w",
        "b/dec_norm": "s/dec_norm",
        "b/w": "s/w",
    }


def test_single_words_decide_only_for_all():
    norms = {f"{name}/scale": (3,) for name in ("pre_attention_norm", "pre_mlp_norm")}
    # The second is the one before the feed-forward block, in the names of many decoders.
    assert paired(norms, {"input_norm/scale": (3,), "post_attention_norm/scale": (3,)})[0] == {}
    assert len(paired(norms, {"norm_attention/scale": (3,), "norm_mlp/scale": (3,)})[0]) == 2


def test_modules_are_found_inside_others():
    ours = {"layer/0/attention/q": (2, 2), "layer/0/norm": (2,), "layer/1/mlp/w": (3, 2), "layer/1/norm": (2,)}
    theirs = {"self_attention/q": (2, 2), "norm_x": (2,), "ffn/w": (3, 2), "norm_y": (2,)}
    pairs, readings = paired(ours, theirs)
    assert pairs == {"layer/0/attention/q": "self_attention/q", "layer/1/mlp/w": "ffn/w"}
    assert readings.keys() == {"norm_x", "norm_y"}


def test_of_trees_with_different_leaves_names_decide():
    ours = {f"encoder/layers_{i}/{name}": (2 + at,) for i in range(2) for at, name in enumerate("abc")}
    pairs, readings = paired(ours, {"enc/layers/0/a": (2,), "enc/layers/1/a": (2,), "head/x": (3,)})
    assert pairs == {"encoder/layers_0/a": "enc/layers/0/a", "encoder/layers_1/a": "enc/layers/1/a"}
    assert readings.keys() == {"head/x"}
    deeper = {f"enc/layers/{i}/a": (2,) for i in range(3)}
    assert paired(ours, deeper)[0] == {}


def test_transposed_namesakes_are_no_pair():
    assert paired({"wi": (2, 3), "wo": (3, 2)}, {"wi": (3, 2), "wo": (2, 3)})[0] == {}
    assert len(paired({"a": (2, 3), "b": (3, 2)}, {"c": (3, 2), "d": (2, 3)})[0]) == 2
