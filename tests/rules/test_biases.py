"""A tower's bias is told from one of each layer, whoever named it."""

import pytest

from orbax_t5x.rules.steps import has_bias_of_tower, has_bias_per_layer
from tests.support import relative_matrix
from tests.support import relative_trees as trees

SIZES = trees.Sizes()


@pytest.mark.parametrize("relative", [one for one in trees.RELATIVES if not one.experts], ids=lambda one: one.name)
def test_every_programs_names(relative):
    made = relative_matrix.made(relative, SIZES)
    for layout, tree in made.items():
        named = tree if not any(name.startswith("target/") for name in tree) else {}
        for tower in ("encoder", "decoder") if named and layout != "Mesh TensorFlow" else ():
            wanted = (
                (relative.bias == "tower", relative.bias == "layer") if tower in relative.towers else (False, False)
            )
            assert (has_bias_of_tower(named, tower), has_bias_per_layer(named, tower)) == wanted, layout
            below = [f"text_encoder.{name}" for name in named] if "." in next(iter(named)) else list(named)
            if layout != "Pix2Struct":
                assert has_bias_per_layer(below, tower) == wanted[1], layout


def test_names_of_llama_cpp_and_of_stacked_layers():
    blocks = [f"enc.blk.{i}.attn_rel_b.weight" for i in range(12)]
    assert has_bias_per_layer(blocks, "encoder") and not has_bias_of_tower(blocks, "encoder")
    assert has_bias_of_tower(blocks[:1], "encoder") and not has_bias_per_layer(blocks[:1], "encoder")
    assert not has_bias_of_tower(blocks, "decoder")
    for name in ("decoder/decoder", "target/decoder/decoder/subblock_0"):
        assert has_bias_per_layer([f"{name}/relpos_bias/rel_embedding"], "decoder")
    assert not has_bias_per_layer(["decoder/relpos_bias/rel_embedding"], "decoder")
