"""Rule packs are values, with the way back."""

import inspect

import pytest

from orbax_t5x import rules
from orbax_t5x.cli.rule_packs import pack_names
from orbax_t5x.errors import RestorePlanError
from tests.support import t5_model
from tests.support.prefixed_models import CONFIGS, source


def test_packs_are_values():
    assert rules.t5_minimal_to_scanned(4, 4) == rules.t5_minimal_to_scanned(4, 4)
    assert hash(rules.hf_t5_to_t5x()) == hash(rules.hf_t5_to_t5x())
    every = [
        *(rules.t5_minimal_to_scanned(4, 4), rules.t5_minimal_to_scanned(4, 8), rules.t5_minimal_to_unscanned(4, 4)),
        *(rules.t5_unscanned_to_scanned(), rules.t5_unscanned_to_scanned(scan_axis=0), rules.hf_t5_to_t5x()),
        *(rules.hf_t5_to_t5x(scale_decoder_outputs=True), rules.t5x_to_hf_t5(), rules.mesh_tf_to_t5x()),
        *(rules.t5x_decoder_to_maxtext(4, 4), rules.t5x_decoder_to_maxtext(4, 4, scanned=False)),
    ]
    assert len({pack.digest() for pack in every}) == len({pack.describe() for pack in every}) == len(every)
    state = {"a": 1}
    assert all(pack(state, {}, is_resuming=True) is state for pack in every)
    assert rules.t5_minimal_to_scanned(4, 4).describe() == "rules.t5_minimal_to_scanned(num_heads=4, head_dim=4)"


HEADS = (4, 4)


def test_the_parts_of_a_pack_are_what_somebody_would_write_out():
    target = {"target": t5_model.init(CONFIGS["scanned"])[1]["params"]}
    pack = rules.infer(source("hugging face"), target)
    assert pack.parts == (rules.hf_t5_to_t5x(), rules.t5_minimal_to_scanned(*HEADS))
    assert pack.inverse().parts == (rules.t5_minimal_to_scanned(*HEADS).inverse(), rules.hf_t5_to_t5x().inverse())
    # A changed digest would make recorded runs ask again.
    assert pack.digest() == "9c474e30ca87c9b453e25a196f091e2f"
    assert rules.infer(target, target).parts == ()


@pytest.mark.parametrize("name", pack_names())
def test_a_pack_has_a_way_back_or_says_that_it_has_none(name):
    function = getattr(rules, name)
    takes_heads = "num_heads" in inspect.signature(function).parameters
    pack = function(*HEADS) if takes_heads else function()
    if name in ("mesh_tf_to_t5x", "scaled_fp8_to_float32"):
        with pytest.raises(RestorePlanError, match=rf"{name}\(\) has no inverse"):
            pack.inverse()
    else:
        assert pack.inverse().steps and pack.inverse().inverse() == pack
