"""Digests of version 0.1 stay: its records are of all transforms and rule packs that there were, by class and field.

The digests were made by version 0.1 (commit 565f5fc).
"""

import pytest

import orbax_t5x as ot
from orbax_t5x.adafactor import FactorDim
from orbax_t5x.checkpoint_importer import t5_importer
from orbax_t5x.provenance.digests import qualified_name

T, R = ot.transforms, ot.rules

DIGESTS = {
    "09b43dc0ee7034897598b1d5f64bf0a6": T.AdafactorSlots(),
    "d73142a9bcf47db7acc8fc779b9bf131": T.AdafactorSlots({"a": (FactorDim.ROW, FactorDim.BATCH, FactorDim.COLUMN)}),
    "e374373ed2329065a7cb6f47f3da637d": T.AssignmentMap([("a/(.*)", r"b/\1")], require_all_rules_match=False),
    "d8c203796a7dd66c17c51950583a704f": T.Average({"x": 1.0, "y": 3.0}, "a/.*"),
    "783302df45a32a8d81e2af228185aa0c": T.Cast("a", "float16"),
    "882ac8c07ea3fe53ff019d7d00e03d38": T.Chain((T.Intersect(), T.Drop("a"))),
    "5b040ac4c6fe2ce3fe9943de90e62db7": T.Concat(("b", "c"), "a", 1),
    "eb918314740942478b3b8cc1f194dd92": T.Drop("a"),
    "ee7a499b2a8fb919ce1e661b2a6ed7da": T.FollowOptimizer(T.Rename([("a", "b")]), roots=(("p/", "q/"),)),
    "4580faf1ef43025c0e63bbb17c98eb5b": T.Intersect(),
    "3dbf4cad353f0ff8082d5c0da01a47c6": T.Keep("a"),
    "3adc30226ed8f7439451043a543333de": T.Merge({"a": {"b": 1}}),
    "0cd4a4cdabb6a7b6490d202cbec2cd43": T.Overlay(("x", "y")),
    "290f7e2bf62a2a56c9066690fb7da7ba": T.Repeat("c", 4, 0),
    "25db6b792de0ed94f378d18587fbb033": T.Reshape("a", (2, -1)),
    "f230efad83b07f47da2fc0dc468f8514": T.Split("a", ("b", "c"), 0),
    "0237f5952eb1c3cc987dc50bfd68a7e4": T.StackLayers(r"layers_(?P<i>\d+)/(.*)", r"layers/\2", -1),
    "116f1ed119017e54a29c6f4a78f060b7": T.Translate(),
    "1d25a6f8db511672767ea2a693a18abe": T.Translate(t5_importer),
    "0ef76cecdccdbf78589cb07e8779d085": T.Transpose("b"),
    "007e9833277a1e997eac4acc399e806a": T.UnstackLayers("layers/(.*)", r"layers_{i}/\1", 1),
    "1e5fc7450ad32aa10531db8b523ec659": R.hf_t5_to_t5x(),
    "9781df66af6d4dbcac4bbe56b5a10647": R.hf_t5_to_t5x().inverse(),
    "42bfc55c46bf6323b0914330621269f8": R.hf_t5_to_t5x(
        tie_word_embeddings=False, scale_decoder_outputs=True, prefix="params/"
    ),
    "42c21d1a8a6665ff213a72b4b0bf5d2e": R.t5x_to_hf_t5(),
    "a2fd4d34fb4a06be8e9b013d900c13b3": R.t5x_to_hf_t5().inverse(),
    "8155943127a59efe36188d10c6222c1a": R.mesh_tf_to_t5x(),
    "1fc52c9d6bff7c7de259667604666608": R.t5_minimal_to_scanned(4, 8),
    "e66ac3aab57f48caf2cf9e5617bf1b69": R.t5_minimal_to_scanned(4, 8, scan_axis=-1).inverse(),
    "1eafb2271b4de5d6d54bc1f4cdd65075": R.t5_minimal_to_unscanned(4, 8),
    "0ab97743541c7bb801b30cc91b54491d": R.t5_minimal_to_unscanned(4, 8).inverse(),
    "972d50cca9be3a152bbd5b2b54d123ce": R.t5_unscanned_to_scanned(),
    "8c9a771594aeb3808155a9b1665956d0": R.t5_unscanned_to_scanned(scan_axis=0).inverse(),
    "4bc5787484e642ff1480f079ce93163c": R.t5x_decoder_to_maxtext(4, 8),
    "507e366aa987fb740affe065bc264a55": R.t5x_decoder_to_maxtext(4, 8).inverse(),
    "58fa8c993787c5449ead7520d79ab24e": R.t5x_decoder_to_maxtext(4, 8, scanned=False),
    "92cb144e4ec963ca5fe061269bb7a1e3": R.t5x_decoder_to_maxtext(4, 8, scanned=False).inverse(),
}

# Plain functions count by name.
FUNCTIONS = {
    "orbax_t5x.state_utils.intersect_state": ot.state_utils.intersect_state,
    "orbax_t5x.state_utils.merge_state": ot.state_utils.merge_state,
    "orbax_t5x.state_utils.apply_assignment_map": ot.state_utils.apply_assignment_map,
}


@pytest.mark.parametrize("digest", DIGESTS)
def test_digests_stay(digest):
    assert DIGESTS[digest].digest() == digest


@pytest.mark.parametrize("name", FUNCTIONS)
def test_names_of_functions_stay(name):
    assert qualified_name(FUNCTIONS[name]) == name
