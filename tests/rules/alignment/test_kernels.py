"""Kernels of convolutions, and models of Transformers beside their twins in Flax."""

import json
import math

import numpy as np
import pytest

import orbax_t5x as ot
from tests.conftest import GOLDENS
from tests.support.aligned_leaves import wrong_leaves

TWINS = json.loads((GOLDENS / "flax_twins" / "twins.json").read_text())
# Their tables are square: nothing shows how they lie.
OPEN = {
    "BloomForCausalLM": ["transformer/word_embeddings/embedding"],
    "GemmaForCausalLM": ["model/embed_tokens/embedding"],
    "LlamaForCausalLM": ["model/embed_tokens/embedding"],
}


def numbered(shapes):
    """Arrays of these shapes in which each number stands once."""
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])
    return {
        name: np.arange(end - math.prod(shape), end, dtype=np.float32).reshape(shape)
        for end, (name, shape) in zip(ends, shapes.items(), strict=True)
    }


@pytest.mark.parametrize("model", TWINS)
def test_twins_are_aligned_as_transformers_converts_them(model):
    theirs = TWINS[model]
    source = numbered(theirs["source"])
    target = {name: source[leaf["from"][0]].transpose(leaf["axes"]) for name, leaf in theirs["target"].items()}
    # Copies of a leaf are one.
    source |= {copy: source[leaf["from"][0]] for leaf in theirs["target"].values() for copy in leaf["from"]}
    alignment = ot.rules.align(source, target)
    assert list(alignment.open) == OPEN.get(model, [])
    assert not wrong_leaves(alignment, source, target)
    back = ot.rules.align(target, source)
    assert not wrong_leaves(back, target, source)


def network(last, kinds):
    """Convolutions by (name, outputs, inputs, window), and whether they are transposed; one value for each place."""
    arrays = numbered({name: (outputs, inputs, *window) for name, outputs, inputs, window, _ in kinds})
    found = {}
    for name, _, _, window, is_transposed in kinds:
        value, axes = arrays[name], tuple(range(2, 2 + len(window)))
        if last:
            found[f"{name}/kernel"] = value.transpose((*axes, 1, 0))
        else:
            found[f"{name}.weight"] = value.swapaxes(0, 1) if is_transposed else value
    return found


SQUARE = [("net.mid", 8, 8, (3, 3), False)]
CLEAR = [("net.stem", 8, 3, (5, 5), False)]
UP = [("net.up", 8, 4, (2, 2), True)]
LINE = [("net.line", 6, 4, (3,), False)]


@pytest.mark.parametrize("is_back", [False, True])
@pytest.mark.parametrize(
    ("kinds", "opened"),
    [
        (CLEAR + SQUARE, 0),
        (CLEAR + SQUARE + LINE, 0),
        (LINE, 0),
        ([("net.line", 6, 4, (3,), False), ("net.other", 4, 4, (3,), False)], 0),
        ([("net.one", 8, 4, (1, 1), False), ("net.two", 8, 4, (3, 3), False)], 0),
        (SQUARE, 1),  # nothing shows which of its dimensions are outputs
        (CLEAR + SQUARE + UP, 2),  # it may be a transposed convolution as well, as one there is
    ],
)
def test_kernels_have_outputs_first_or_last(kinds, opened, is_back):
    sides = [network(last, kinds) for last in (False, True)]
    source, target = sides[::-1] if is_back else sides
    alignment = ot.rules.align(source, target)
    assert not wrong_leaves(alignment, source, target)
    assert len(alignment.open) == opened, alignment
    if not opened:
        assert not wrong_leaves(alignment.inverse(), target, source)


@pytest.mark.parametrize("is_back", [False, True])
@pytest.mark.parametrize("axes", [(None, 0), (None, 1), (0, None), (1, 0), (1, 1)])
def test_kernels_of_layers_are_turned_on_any_axis(axes, is_back):
    """Norms beside them show where the layers are."""

    def blocks(last, axis):
        layer = network(last, [("down", 6, 4, (3, 3), False), ("mid", 6, 6, (3, 3), False)])
        layer["norm/scale" if last else "norm.weight"] = np.arange(500, 506, dtype=np.float32)
        layers = [layer] * 5
        layers = [{name: value + 1000 * number for name, value in layer.items()} for number, layer in enumerate(layers)]
        join = "/" if last else "."
        if axis is not None:
            return {
                f"blocks{join}{name}": np.stack([one[name] for one in layers], min(axis, layer[name].ndim))
                for name in layers[0]
            }
        return {f"blocks{join}{at}{join}{name}": value for at, one in enumerate(layers) for name, value in one.items()}

    sides = [blocks(last, axis) for last, axis in zip((False, True), axes, strict=True)]
    source, target = sides[::-1] if is_back else sides
    alignment = ot.rules.align(source, target)
    assert alignment.is_complete and not wrong_leaves(alignment, source, target)
    assert not wrong_leaves(alignment.inverse(), target, source)
