"""Rows that fold say exactly what they stand for: an expander written for the test alone is the oracle."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbax_t5x.text.fold import TreeLeaf, empty_text, fold, fold_names, runs, tree_rows


def expand(text):
    """All names that a folded text stands for, the last braces fastest."""
    parts = re.split(r"\{([^}]*)\}", text)
    choices = [[part] if index % 2 == 0 else numbers(part) for index, part in enumerate(parts)]
    return ["".join(choice) for choice in itertools.product(*choices)]


def numbers(braces):
    found = []
    for part in braces.split(","):
        bounds, _, step = part.partition(":")
        first, _, last = bounds.partition("…")
        last = last or first
        direction = int(step or 1) * (1 if int(last) >= int(first) else -1)
        width = max(len(end) if end.startswith("0") else 1 for end in (first, last))
        found += [str(number).zfill(width) for number in range(int(first), int(last) + direction, direction)]
    return found


def test_layers_fold_and_wi_0_and_wi_1_stay_apart():
    names = [f"encoder/layers_{i}/mlp/wi_{j}/kernel" for i in range(24) for j in range(2)]
    assert [row.label for row in fold_names(names)] == [
        "encoder/layers_{0…23}/mlp/wi_0/kernel ×24",
        "encoder/layers_{0…23}/mlp/wi_1/kernel ×24",
    ]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("0 1 2 3", "{0…3}"),
        ("000 001 002", "{000…002}"),
        ("0 1", "{0,1}"),
        ("3 2 1 0", "{3…0}"),
        ("0 2 4 6", "{0…6:2}"),
        ("1 2 3 0", "{1…3,0}"),
        ("2 4 7 8 9 10", "{2,4,7…10}"),
        ("010 007 004", "{010…004:3}"),
        ("08 9 10 11", "{08,9…11}"),
        ("5 5 5", "5"),
        ("0 3 1 7 2 9 4", None),
    ],
)
def test_runs_keep_the_order(given, told):
    assert runs(given.split()) == told


def test_experts_in_layers_fold_twice():
    names = [f"layers_{i}/expert_{j}/wi" for i in range(6) for j in range(8)]
    (row,) = fold_names(names)
    assert row.texts == ("layers_{0…5}/expert_{0…7}/wi",) and len(row.members) == 48


def test_sources_in_another_order_are_told_in_that_order():
    rows = [(f"layers_{i}/k", f"block_{(i + 1) % 6}/k") for i in range(6)]
    (row,) = fold(rows)
    assert row.texts == ("layers_{0…5}/k", "block_{1…5,0}/k")


def test_what_follows_no_order_stays_apart():
    rows = [(f"layers_{i}/k", f"block_{j}/k") for i, j in enumerate([4, 0, 7, 2, 9, 1, 5])]
    assert [row.texts for row in fold(rows)] == rows


def test_equal_rows_stay_apart():
    rows = [(f"layers_{i}/k",) for i in (0, 1, 1, 2)]
    assert [row.texts for row in fold(rows)] == rows


def test_only_alike_rows_fold():
    names = [(f"layers_{i}/k",) for i in range(4)]
    assert [row.texts[0] for row in fold(names, ["a", "b", "a", "b"])] == ["layers_{0,2}/k", "layers_{1,3}/k"]


NAMES = st.lists(
    st.tuples(
        st.sampled_from(["layers_", "block_0", "a/", ""]),
        st.integers(0, 14),
        st.sampled_from(["/k", "/wi_0", "/wi_1", ""]),
    ),
    max_size=60,
    unique=True,
).map(lambda parts: [f"{before}{number}{after}" for before, number, after in parts])


@given(NAMES, st.randoms())
def test_a_row_stands_for_exactly_its_members(names, random):
    names = list(dict.fromkeys(names))
    others = [re.sub(r"\d+", lambda m: str((int(m[0]) * 3 + 1) % 17), name) for name in names]
    rows = list(zip(names, others, strict=True))
    random.shuffle(rows)
    folded = fold(rows)
    assert sorted(member for row in folded for member in row.members) == list(range(len(rows)))
    for row in folded:
        members = [rows[member] for member in row.members]
        assert expand(row.texts[0]) == [name for name, _ in members]
        if len(members) > 1 and row.texts[1].count("{") == 1:
            assert expand(row.texts[1]) == [other for _, other in members]


def tree_of(leaves, **options):
    return [(row.label, row.array, row.size) for row in tree_rows(leaves, **options)]


def test_repeated_layers_are_a_branch_and_chains_a_row():
    leaves = {f"a/b/layers_{i}/{name}": TreeLeaf("float32[2]", 8) for i in range(3) for name in ("wi", "wo")}
    assert tree_of(leaves) == [
        ("a/b/layers_{0…2}/", "", "48 B"),
        ("  wi", "float32[2] ×3", "24 B"),
        ("  wo", "float32[2] ×3", "24 B"),
    ]
    assert len(tree_of(leaves, folded=False)) == 1 + 3 + 6


def test_a_name_may_be_a_leaf_and_a_branch():
    leaves = {"a": TreeLeaf("int32[]", 4), "a/b": TreeLeaf("int32[]", 4), "c": TreeLeaf("None", 0)}
    assert tree_of(leaves) == [("a", "int32[]", "4 B"), ("a/", "", "4 B"), ("  b", "int32[]", "4 B"), ("c", "None", "")]


def test_nodes_without_leaves_have_words():
    assert [empty_text(value) for value in (None, {}, [], ...)] == [
        "None",
        "empty dict",
        "empty list",
        "... (nothing was saved)",
    ]
