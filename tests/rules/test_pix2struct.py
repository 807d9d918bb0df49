"""The names of Pix2Struct's decoder both ways; `test_relatives` has its values in every layout."""

import pytest

import orbax_t5x as ot
from orbax_t5x import rules
from orbax_t5x.testing.transform_suite import as_numpy, assert_same, run
from tests.support import relative_trees as trees
from tests.support import t5_layouts as t5

MODEL = trees.by_name("Pix2Struct's decoder")
PLAIN = trees.minimal(MODEL, trees.Sizes(decoder=2))
PACK = rules.pix2struct_decoder_to_hf_t5()


@pytest.mark.parametrize("prefix", ["", "model."])
def test_names_of_the_decoder_are_those_of_t5s(prefix):
    theirs = trees.pix2struct(PLAIN, MODEL)
    found, diagnostics = run(PACK, t5.below(prefix, theirs))
    assert not diagnostics.problems and len(found) == len(theirs)
    attention = "decoder.layer.1.self_attention.attention.query.weight"
    assert_same({"q": found["decoder.block.1.layer.0.SelfAttention.q.weight"]}, {"q": theirs[attention]})
    back, diagnostics = run(PACK.inverse(), found)
    assert not diagnostics.problems
    assert_same({name: as_numpy(value) for name, value in back.items()}, theirs)


def test_the_encoder_has_no_place():
    with pytest.raises(ot.errors.RestorePlanError, match="encoder"):
        PACK({"decoder.lm_head.weight": 1, "encoder.layer.0.attention.query.weight": 2}, {})
