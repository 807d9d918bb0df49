"""Tables of the leaves that a layout of T5 can have: names below any prefix, and shapes that agree with one another."""

import numpy as np
import pytest

from orbax_t5x.rules.leaf_table import dimensions_of, layer_names, maxtext_tables, mesh_tf_table, t5x_table


@pytest.mark.parametrize(
    ("name", "letters"),
    [
        ("token_embedder/embedding", "VE"),
        ("encoder/layers_*/pre_mlp_layer_norm/scale", "E"),
        ("encoder/layers_*/relpos_bias/rel_embedding", "H*"),
        ("decoder/layers_*/self_attention/query/kernel", "EJ"),
        ("decoder/layers_*/self_attention/out/kernel", "JE"),
        ("decoder/layers_*/mlp/wo/kernel", "FE"),
        ("decoder/logits_dense/kernel", "EV"),
    ],
)
def test_dimensions_follow_from_the_end_of_a_name(name, letters):
    assert dimensions_of(name) == letters


def test_each_sublayer_has_a_name_in_both_libraries():
    pairs = layer_names()
    assert len({theirs for theirs, _ in pairs}) == len({ours for _, ours in pairs}) == len(pairs)
    assert ("decoder.block.*.layer.2.DenseReluDense.wo.weight", "decoder/layers_*/mlp/wo/kernel") in pairs


def of(shapes):
    return {name: np.empty(shape) for name, shape in shapes.items()}


MODEL = {
    "token_embedder/embedding": (100, 8),
    "encoder/layers_0/attention/query/kernel": (8, 12),
    "encoder/layers_1/attention/query/kernel": (8, 12),
    "encoder/layers_1/attention/out/kernel": (12, 8),
    "encoder/encoder_norm/scale": (8,),
    "decoder/layers_0/mlp/wi/kernel": (8, 32),
}


def test_a_model_is_found_below_its_prefix_and_its_slots_are_not():
    table = t5x_table("minimal")
    names = [f"target/{name}" for name in MODEL] + ["state/param_states/encoder/encoder_norm/scale/v", "step"]
    assert table.prefixes(names) == ["target/"]
    assert set(table.model(names)) == {f"target/{name}" for name in MODEL}
    assert table.model(names)["target/encoder/layers_1/attention/out/kernel"].startswith("encoder/layers_*/")
    assert table.prefixes(MODEL) == [""] and table.prefixes(["step", "w"]) == []


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("encoder/layers_1/attention/out/kernel", (12, 9), "E of 8, as other leaves have, and not of 9"),
        ("encoder/layers_1/attention/query/kernel", (8, 3, 4), "(E, J)"),
        ("encoder/encoder_norm/scale", (), "(E,)"),
        ("encoder/layers_0/attention/gate/kernel", (8, 8), ""),
    ],
)
def test_a_leaf_that_the_layout_cannot_have_is_named_with_the_reason(name, shape, reason):
    table = t5x_table("minimal")
    assert table.unfit(of(MODEL)) == {}
    assert table.unfit(of({**MODEL, name: shape})) == {name: reason}


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_stacked_layers_have_their_axis_where_the_scan_has_it(axis):
    table = t5x_table("scanned", scan_axis=axis)
    stacked = np.moveaxis(np.empty((8, 12, 5)), -1, axis).shape
    name = "encoder/encoder/attention/query/kernel"
    assert table.unfit(of({**{"token_embedder/embedding": (100, 8)}, name: stacked})) == {}
    wrong = (*stacked[:-1], stacked[-1], 1)
    assert set(table.unfit(of({name: wrong}))) == {name}


def test_split_heads_are_another_layout():
    name = "decoder/layers_0/self_attention/query/kernel"
    joined, split = of({name: (8, 12)}), of({name: (8, 3, 4)})
    assert t5x_table("both", heads=("joined", "split")).unfit(joined | {}) == {}
    assert t5x_table("both", heads=("joined", "split")).unfit(split) == {}
    assert t5x_table("split", heads=("split",)).unfit(joined) == {name: "(E, H, D)"}


def test_tables_of_other_libraries_know_their_own_names():
    mesh = mesh_tf_table()
    assert mesh.leaves["decoder/block_*/layer_001/EncDecAttention/q"] == ("EJ",)
    assert "transformer/block_*/layer_001/DenseReluDense/wi/kernel" in mesh.leaves
    assert mesh.unfit(of({"shared/embedding": (4, 8), "encoder/unknown": (3,)})) == {}  # Translate reports it
    ours, theirs = maxtext_tables(1)
    assert theirs.leaves["decoder/layers/mlp/wo/kernel"] == ("FLE",)
    assert ours.leaves["decoder/layers_*/mlp/wo/kernel"] == ("FE",) and ours.leaves["encoder/encoder_norm/scale"] == ()
