"""Where no pack leads from one tree to another, the error says what both are, and what would lead there."""

import jax
import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x import rules
from orbax_t5x import transforms as tr
from orbax_t5x.errors import RestorePlanError
from orbax_t5x.trees.flat import flatten, unflatten
from tests.support import t5_layouts
from tests.support.memory_checkpoint import checkpoint


def test_infer_says_what_it_saw_when_nothing_fits(shapes):
    with pytest.raises(RestorePlanError, match="unknown names"):
        rules.infer({"a": np.zeros(2)}, shapes["minimal"])
    shallow = {name: leaf for name, leaf in shapes["minimal"].items() if "layers_2" not in name}
    with pytest.raises(RestorePlanError, match="encoder has 2 layers, 3 are wanted"):
        rules.infer(shallow, shapes["scanned"])
    with pytest.raises(TypeError, match="not as int"):
        rules.infer(3, shapes["scanned"])


@pytest.mark.parametrize("way", ["to scanned", "from scanned"])
def test_another_depth_between_two_layouts_is_one_problem(way):
    """RepeatLayers between the packs; its fix gives every leaf."""
    plain = t5_layouts.below("target/", t5_layouts.minimal())
    repeat = tr.RepeatLayers(r"target/encoder/layers_(\d+)/.*", 6)
    deeper = flatten(jax.tree.map(np.asarray, repeat(unflatten(plain), {})))
    scan = rules.t5_minimal_to_scanned(t5_layouts.H, t5_layouts.D)
    wide = flatten(jax.tree.map(np.asarray, scan(unflatten(deeper), {})))
    source, target = (plain, wide) if way == "to scanned" else (wide, plain)
    target = unflatten({name: np.zeros_like(value) for name, value in target.items()})
    with pytest.raises(RestorePlanError) as caught:
        ot.plan_restore(checkpoint(source), target, "auto")
    (problem,) = caught.value.problems
    old, new = (3, 6) if way == "to scanned" else (6, 3)
    assert f"the checkpoint's encoder has {old} layers, {new} are wanted" in problem.message
    found = flatten(ot.restore(checkpoint(source), target, problem.fix.arguments["transforms"]))
    expected = wide if way == "to scanned" else plain
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)
