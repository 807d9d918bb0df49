"""Public names of the transforms, and their digests."""

import re

import numpy as np

from orbax_t5x import transforms as tr
from orbax_t5x.transforms.base import describe_transform


def test_digests_tell_rules_apart_and_not_how_they_were_written():
    assert tr.Rename([("a", "b")]).digest() == tr.Rename(((re.compile("a"), "b"),)).digest()
    assert tr.Rename([("a", "b")]).digest() != tr.Rename(((re.compile("a", re.IGNORECASE), "b"),)).digest()
    assert tr.Cast("a", np.float32).digest() == tr.Cast("a", "float32").digest()
    assert tr.Merge({"a": np.zeros(2)}).digest() == tr.Merge({"a": np.zeros(2)}).digest()
    assert tr.Merge({"a": np.zeros(2)}).digest() != tr.Merge({"a": np.ones(2)}).digest()
    assert tr.Merge({"a": np.zeros(2)}).digest() != tr.Merge({"a": np.zeros(3)}).digest()


def test_public_names():
    """The transforms and their base; what runs them is imported from its own module."""
    assert set(tr.__all__) == {
        "inverse",
        "AdafactorSlots",
        "AddLowRank",
        "Affine",
        "AssignmentMap",
        "Average",
        "Cast",
        "Chain",
        "Concat",
        "Dequantize",
        "Drop",
        "FALLBACK",
        "FollowOptimizer",
        "Intersect",
        "Keep",
        "Merge",
        "Overlay",
        "Pad",
        "Rename",
        "Repeat",
        "RepeatLayers",
        "Reshape",
        "Slice",
        "Split",
        "StackLayers",
        "Transform",
        "Translate",
        "Transpose",
        "UnstackLayers",
    }
    assert all(issubclass(getattr(tr, name), tr.Transform) for name in tr.__all__ if name[:2].istitle())


def a_function(state, target):
    return state


def test_fields_that_have_their_defaults_are_left_out():
    assert describe_transform(tr.Drop("a/.*")).startswith("Drop(")
    text = describe_transform(tr.Rename([("a", "b")]))
    assert text.startswith("Rename(") and "'a'" in text and "'b'" in text


def test_hundreds_of_rules_are_one_short_line():
    text = describe_transform(tr.Rename([(f"a{i}", f"b{i}") for i in range(500)]))
    assert "\n" not in text and len(text) < 200 and "500 in all" in text and "a499" not in text


def test_patterns_are_shown_as_text_and_functions_by_name():
    assert "re.compile" not in describe_transform(tr.Drop(re.compile("a/.*")))
    assert describe_transform(a_function).endswith("a_function (opaque)")
