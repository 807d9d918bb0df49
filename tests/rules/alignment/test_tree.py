"""Subtrees with equal shapes and equal structure have equal numbers, whatever their names."""

from orbax_t5x.rules.alignment.tree import subtree_of
from tests.support.aligned_leaves import items


def tree(shapes):
    return subtree_of(items(shapes))


def test_names_do_not_count():
    one, other = tree({"a/x": (2,), "a/y": (3,), "b": (4,)}), tree({"r": (4,), "s/q": (3,), "s/p": (2,)})
    assert (one.bag, one.structure, one.size) == (other.bag, other.structure, other.size)
    flat = tree({"x": (2,), "y": (3,), "b": (4,)})
    assert one.bag == flat.bag and one.structure != flat.structure
    assert one.bag != tree({"a/x": (2,), "a/y": (3,), "b": (5,)}).bag


def test_only_nodes_with_several_leaves_below_count():
    one = tree({"params/a/value": (2,), "params/b/value": (3,)})
    assert one.label == ("params",) and [child.label for child in one.children] == [("a", "value"), ("b", "value")]
    assert one.structure == tree({"a": (2,), "b": (3,)}).structure


def test_layers_are_ordered_by_number():
    layers = tree({f"layers_{i}": (i,) for i in (10, 2, 1)})
    assert layers.is_list and [child.label for child in layers.children] == [(1,), (2,), (10,)]
    assert layers.structure != tree({f"h/{i}": (11 - i,) for i in (10, 2, 1)}).structure


def test_numbers_of_other_lists_are_other_words():
    parts = [child.words() for child in tree({"wi_0": (2,), "wi_1": (2,)}).spread()]
    assert parts == [["wi", "wi_0"], ["wi", "wi_1"]]
    parts = [child.words()[-1] for child in tree({f"wi_{i}": (2,) for i in (1, 2)}).spread()]
    assert parts == ["wi_1 of [1, 2]", "wi_2 of [1, 2]"]


def test_a_leaf_may_be_where_others_are_below():
    node = tree({"a": (2,), "a/b": (3,)})
    assert sorted(item.names for item in node.items()) == [("a",), ("a/b",)]
    assert node.all_words == {"a", "b"}
