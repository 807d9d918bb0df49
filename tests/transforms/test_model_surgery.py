"""Orbax's transformations on lazy leaves give what they give on arrays; Orbax itself is the oracle."""

import warnings

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import RestorePlanError
from orbax_t5x.transforms.model_surgery import adopt_orbax
from orbax_t5x.trees.flat import flatten
from tests.support.memory_checkpoint import checkpoint
from tests.support.recorded_chains import digests_of

with warnings.catch_warnings():  # Orbax's modules ask jax.jit for a backend when they are imported
    warnings.simplefilter("ignore", DeprecationWarning)
    from orbax.checkpoint.experimental.model_surgery.transformations import (
        fusing,
        nesting,
        renaming,
        repeating,
        stacking,
    )

RNG = np.random.default_rng(0)
SOURCE = {
    f"model.layers.{layer}.{part}.weight": RNG.random((4, 6), np.float32)
    for layer in range(3)
    for part in ("gate", "up")
} | {"model.norm.weight": RNG.random(6, np.float32)}
MATRIX = next(iter(SOURCE))
EXPERTS = {name: value for name, value in SOURCE.items() if "layers.1.up" not in name}
STACK = r"layers\.(\d+\.)"
CASES = {
    "rename": (SOURCE, lambda: renaming.rename_by_regex([(r"^model\.", ""), (r"(\d+)", r"x\1")])),
    "fuse by pattern": (
        SOURCE,
        lambda: fusing.fuse_by_pattern(pattern="model", unique_parts=["gate", "up"], fused_unique_part="both", axis=1),
    ),
    "fuse a missing part": (
        EXPERTS,
        lambda: fusing.fuse_by_pattern(pattern="model", unique_parts=["gate", "up"], fused_unique_part="both"),
    ),
    "fuse by keys": (SOURCE, lambda: fusing.fuse_by_keys(source_keys=list(SOURCE)[:2], target_key="fused", axis=-1)),
    "repeat by pattern": (SOURCE, lambda: repeating.repeat_by_pattern(pattern=".*up", dimension=-1, repeat_count=3)),
    "repeat by keys": (
        SOURCE,
        lambda: repeating.repeat_by_keys(target_keys=["model.norm.weight", "no"], dimension=0, repeat_count=2),
    ),
    "stack": (SOURCE, lambda: stacking.stack(STACK)),
    "stack on an axis": (SOURCE, lambda: stacking.stack(STACK, axis=1, inplace=True, expected_count=3)),
    "stack with holes": (EXPERTS, lambda: stacking.stack(STACK, default_filler=0.5)),
    "stack with a filler by name": (
        EXPERTS,
        lambda: stacking.stack(STACK, axis=2, expected_count=5, filler_mapping={"up": -2, "gate": 3}),
    ),
    "unflatten": (SOURCE, lambda: nesting.unflatten()),
    "unflatten into a target": (
        SOURCE,
        lambda: nesting.unflatten(target={"model": {"norm": {"weight": np.zeros(6, np.float32)}}}),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_orbax_makes_of_arrays(name):
    source, make = CASES[name]
    expected = flatten(make()(dict(source)))
    # Dots are no separators of names here, so what Orbax's function sees is the same flat dict.
    got = flatten(ot.restore(checkpoint(source), None, make()))
    assert got.keys() == expected.keys()
    for leaf, value in got.items():
        assert value.dtype == expected[leaf].dtype
        np.testing.assert_array_equal(value, expected[leaf])


def test_only_what_is_wanted_is_read():
    wanted = {f"layers.{part}.weight": np.zeros((3, 4, 6), np.float32) for part in ("gate", "up")}
    chain = [renaming.rename_by_regex([(r"^model\.", "")]), stacking.stack(STACK), ot.transforms.Drop(["norm.*"])]
    plan = ot.plan_restore(checkpoint(SOURCE), wanted, chain)
    assert plan.bytes_to_read == 6 * 4 * 6 * 4


def test_names_have_slashes_where_the_tree_is_nested():
    nested = {"encoder/layers_0/w": np.ones(2), "encoder/layers_1/w": np.zeros(2)}
    got = ot.restore(checkpoint(nested), None, stacking.stack(r"/(layers_\d+/)"))
    np.testing.assert_array_equal(got["encoder"]["w"], [[1, 1], [0, 0]])


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: renaming.rename_by_regex([(r"\d+", "0")]), "duplicate"),
        (lambda: stacking.stack(STACK, expected_count=2, default_filler=0.0), "transform"),
        (lambda: stacking.stack(STACK, expected_count=7), "transform"),
        (
            lambda: fusing.fuse_by_keys(source_keys=["model.norm.weight", next(iter(SOURCE))], target_key="f"),
            "transform",
        ),
    ],
)
def test_what_orbax_loses_or_refuses_is_a_problem(make, kind):
    with pytest.raises(RestorePlanError) as raised:
        ot.restore(checkpoint(SOURCE), None, make())
    assert {problem.kind for problem in raised.value.problems} == {kind}


def test_equal_arguments_have_equal_digests():
    def digest(**arguments):
        return digests_of([adopt_orbax(stacking.stack(STACK, **arguments))])[0]

    assert digest(axis=1) == digest(axis=1, inplace=True) != digest(axis=0)
    assert digest() is not None
