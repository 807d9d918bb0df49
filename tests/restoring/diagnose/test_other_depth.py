"""A target with more or fewer layers than the checkpoint is one problem, and no axis of layers is padded."""

import dataclasses
import re

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.trees.flat import flatten, unflatten
from tests.support.failed_plans import HF, HF_CONFIG, applied, parameters, problems_of
from tests.support.memory_checkpoint import checkpoint


@pytest.mark.slow
def test_more_layers_are_one_problem_for_a_tower():
    source = parameters(HF_CONFIG)
    target = parameters(dataclasses.replace(HF_CONFIG, encoder_layers=4, decoder_layers=5))
    stored = checkpoint({name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in source.items()})
    found = problems_of(stored, unflatten(target))
    told = [problem.message.partition(";")[0] for problem in found]
    assert told == [
        "the checkpoint's decoder has 3 layers, 5 are wanted",
        "the checkpoint's encoder has 2 layers, 4 are wanted",
    ]
    others = {name: np.ones(leaf.shape, leaf.dtype) for name, leaf in target.items() if name not in source}
    ot.plan_restore(stored, unflatten(target), fallback=unflatten(others))
    deeper = ot.plan_restore(stored, unflatten(target), [one for problem in found for one in problem.fix.transforms])
    assert all(entry.action == "read" for entry in deeper.entries) and not deeper.unused


WIDTHS = {"a": (2,), "b": (2, 3), "c": (3, 2)}


def leaves(layer, depth):
    arrays = {
        f"{layer.format(i)}/{name}": np.full(shape, i, "f4") for i in range(depth) for name, shape in WIDTHS.items()
    }
    return {**arrays, "norm": np.ones(2, np.float32)}


def assert_repeated(source, target):
    """One problem, whose first way is RepeatLayers, which gives each new layer the values of an old one."""
    (problem,) = problems_of(checkpoint(source), target)
    assert not any("Pad" in str(way) for way in problem.fix.ways)
    transforms = applied(problem.fix.ways[0])
    found = flatten(ot.restore(checkpoint(source), target, transforms))
    old, new = (sum(name.endswith("/a") and "mu" not in name for name in tree) for tree in (source, target))
    for name in target:
        was = re.sub(r"(\d+)(?=/[abc]$)", lambda match: str(int(match[1]) * old // new), name)
        np.testing.assert_array_equal(found[name], source[was])
    return problem


@pytest.mark.parametrize("old, new", [(12, 16), (12, 24), (24, 12), (2, 1)])
@pytest.mark.parametrize(
    "layer",
    ["layers_{}", "block_{}", "h/{}", "blocks/{}", "layer_{}", "params/TransformerBlock_{}", "m.encoder.layer.{}"],
)
def test_layers_have_several_names(layer, old, new):
    problem = assert_repeated(leaves(layer, old), leaves(layer, new))
    tower = "'s encoder" if "encoder" in layer else ""
    assert problem.message.startswith(
        f"the checkpoint{tower} has {old} layers, {new} {'is' if new == 1 else 'are'} wanted"
    )
    assert problem.leaf is None and problem.kind == ("missing" if new > old else "leftover")


def test_the_optimizer_follows():
    def state(depth):
        params = leaves("params/layers_{}", depth)
        slots = {
            f"opt_state/0/{kind}{name[6:]}": value
            for name, value in params.items()
            for kind in ("mu", "nu")
            if "/" in name
        }
        return {**params, **slots, "opt_state/0/count": np.int32(1), "step": np.int32(1)}

    problem = assert_repeated(state(12), state(16))
    assert "RepeatLayers" in str(problem.fix)


@pytest.mark.parametrize("change", ["shape", "leaf", "gap"])
def test_layers_that_differ_otherwise_are_not_repeated(change):
    source, target = leaves("layers_{}", 3), leaves("layers_{}", 5)
    if change == "shape":
        target["layers_4/a"] = np.ones(7, np.float32)
    elif change == "leaf":
        target["layers_4/d"] = np.ones(2, np.float32)
    else:
        source = {name: value for name, value in source.items() if "layers_1" not in name}
    first, *_ = problems_of(checkpoint(source), target)
    assert "has 3 layers, 5 are wanted" in first.message and not any(way.transforms for way in first.fix.ways)


def test_a_layer_that_lacks_a_leaf_is_no_other_depth():
    leaves = {f"layers_{i}/{name}": np.ones(2, np.float32) for i in range(3) for name in ("one", "other")}
    (problem,) = problems_of(checkpoint({name: leaves[name] for name in leaves if name != "layers_1/other"}), leaves)
    assert problem.leaf == "layers_1/other"


def test_experts_and_kernels_with_numbers_are_no_layers():
    for part in ("experts_{}", "wi_{}"):
        source = {f"{part.format(i)}/{name}": np.ones(2, np.float32) for i in range(2) for name in ("w", "b")}
        target = {f"{part.format(i)}/{name}": np.ones(2, np.float32) for i in range(4) for name in ("w", "b")}
        told = " ".join(problem.message for problem in problems_of(checkpoint(source), target))
        assert "expert" not in part or "layers" not in told


# -- layers on one axis


def scanned(depth, *, container="target/decoder/decoder", axis=1):
    shapes = {"wi/kernel": (4, 6), "wo/kernel": (6, 4), "norm/scale": (4,)}
    stacked = {f"{container}/{name}": (*shape[:axis], depth, *shape[axis:]) for name, shape in shapes.items()}
    stacked |= {"target/token_embedder/embedding": (9, 4), "target/decoder/decoder_norm/scale": (4,)}
    return {name: np.arange(np.prod(shape), dtype="f4").reshape(shape) for name, shape in stacked.items()}


@pytest.mark.parametrize("old, new", [(2, 4), (12, 24), (4, 2), (4, 6)])
@pytest.mark.parametrize("container", ["target/decoder/decoder", "params/layers", "params/blocks", "params/ScanBlocks"])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_dimension_of_layers_is_never_padded(old, new, container, axis):
    source, target = (scanned(depth, container=container, axis=axis) for depth in (old, new))
    (problem,) = problems_of(checkpoint(source), target)
    assert f"has {old} layers, {new} are wanted" in problem.message and problem.kind == "shape"
    assert "Pad" not in str(problem.fix) and problem.leaf is None
    found = flatten(ot.restore(checkpoint(source), target, applied(problem.fix.ways[0])))
    for name, value in source.items():
        taken = np.take(value, np.arange(new) * old // new, axis) if f"{container}/" in name else value
        np.testing.assert_array_equal(found[name], taken)


def test_the_slots_of_a_dimension_of_layers_follow():
    def state(depth):
        params = scanned(depth)
        slots = {f"state/param_states{name[6:]}/v": value for name, value in params.items()}
        return {**params, **slots, "state/step": np.int32(1)}

    (problem,) = problems_of(checkpoint(state(2)), unflatten(state(4)))
    assert "RepeatLayers" in str(problem.fix) and "checkpoint's decoder has 2 layers, 4 are wanted" in problem.message
    found = flatten(ot.restore(checkpoint(state(2)), unflatten(state(4)), applied(problem.fix.ways[0])))
    name = "state/param_states/decoder/decoder/wi/kernel/v"
    np.testing.assert_array_equal(found[name], np.repeat(state(2)[name], 2, 1))


def test_another_width_is_no_other_depth():
    """The width is a dimension of the embedding, too; none of its leaves grows by zeros."""
    shapes = {"layers/wi/kernel": (2, 4, 6), "layers/wo/kernel": (2, 6, 4), "layers/scale": (2, 4), "norm/scale": (4,)}
    source = {name: np.zeros(shape) for name, shape in shapes.items()}
    target = {name: np.zeros([5 if size == 4 else size for size in shape]) for name, shape in shapes.items()}
    found = problems_of(checkpoint(source), target)
    assert len(found) == 4 and not any(way.transforms for problem in found for way in problem.fix.ways)
    assert all("layers" not in problem.message or "shape" in problem.message for problem in found)


def test_a_vocabulary_grows_by_rows():
    source = {"token_embedder/embedding": np.zeros((8, 4)), "shared": np.zeros((8, 4)), "lm_head": np.zeros((4, 8))}
    target = {name: np.zeros([9 if size == 8 else size for size in value.shape]) for name, value in source.items()}
    assert all("ot.transforms.Pad" in str(problem.fix) for problem in problems_of(checkpoint(source), target))


@pytest.mark.slow
def test_what_auto_found_is_written_out_before_the_layers():
    target = unflatten(parameters(dataclasses.replace(HF_CONFIG, encoder_layers=4)))
    (problem,) = problems_of(HF, target, "auto")
    first = problem.fix.ways[0]
    assert str(first).startswith("pass transforms=[ot.rules.hf_t5_to_t5x(), ot.transforms.RepeatLayers(")
    assert not ot.plan_restore(HF, target, applied(first)).unused
    (problem,) = problems_of(HF, target, [ot.rules.hf_t5_to_t5x()])
    assert str(problem.fix.ways[0]).startswith("pass transforms=[*transforms, ot.transforms.RepeatLayers(")
