"""Public names of the transforms, and their digests."""

import re

import numpy as np

from orbax_t5x import transforms as tr


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
