"""Closest names are close, and found at little cost."""

from orbax_t5x.transforms.patterns.closest import ClosestNames, closest_names


def test_closest_names_are_close_and_cheap():
    names = [f"target/decoder/layers_{i}/{m}/kernel" for i in range(5000) for m in ("query", "key", "value", "out")]
    assert closest_names("target/decoder/layer_17/query/kernel", names)[0] == "target/decoder/layers_17/query/kernel"
    assert closest_names(r"target/decoder/block_(\d+)/query/(.*)", names)[0].endswith("/query/kernel")
    assert closest_names("something/else", ["x", "y"]) == []
    looked_at = ClosestNames(iter(f"n{i}" for i in range(10**9)))
    assert looked_at.to("n7")[0] == "n7"
