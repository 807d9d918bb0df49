"""Rule packs by their name and dimensions."""

import inspect

import pytest

import orbax_t5x as ot
from orbax_t5x.cli.rule_packs import pack_argument, pack_names
from orbax_t5x.text.output import UsageError


@pytest.mark.parametrize(
    ("text", "pack"),
    [
        ("t5_minimal_to_scanned:12,64", ot.rules.t5_minimal_to_scanned(12, 64)),
        ("t5_minimal_to_scanned:12,head_dim=64,scan_axis=0", ot.rules.t5_minimal_to_scanned(12, 64, scan_axis=0)),
        ("t5_minimal_to_unscanned:2,8:inverse", ot.rules.t5_minimal_to_unscanned(2, 8).inverse()),
        ("t5_unscanned_to_scanned", ot.rules.t5_unscanned_to_scanned()),
        ("t5_unscanned_to_scanned:subblocks=2", ot.rules.t5_unscanned_to_scanned(subblocks=2)),
        ("t5_minimal_to_scanned:2,8,bias_per_layer=true", ot.rules.t5_minimal_to_scanned(2, 8, bias_per_layer=True)),
        ("t5x_to_hf_t5:encoder_attention_type=local", ot.rules.t5x_to_hf_t5(encoder_attention_type="local")),
        ("t5_unscanned_to_scanned:scan_axis=-1:inverse", ot.rules.t5_unscanned_to_scanned(scan_axis=-1).inverse()),
        ("hf_t5_to_t5x", ot.rules.hf_t5_to_t5x()),
        (
            "hf_t5_to_t5x:tie_word_embeddings=false,scale_decoder_outputs=None,prefix=params/",
            ot.rules.hf_t5_to_t5x(tie_word_embeddings=False, scale_decoder_outputs=None, prefix="params/"),
        ),
        ("t5x_to_hf_t5", ot.rules.t5x_to_hf_t5()),
        ("t5x_to_hf_t5:inverse", ot.rules.t5x_to_hf_t5().inverse()),
        ("t5x_decoder_to_maxtext:4,16,scanned=false", ot.rules.t5x_decoder_to_maxtext(4, 16, scanned=False)),
        ("mesh_tf_to_t5x", ot.rules.mesh_tf_to_t5x()),
    ],
)
def test_a_pack_by_name_is_the_pack(text, pack):
    found = pack_argument(text)
    assert found == pack and found.name == pack.name


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("t5_minimal_to_scaned:1,2", "no such pack; did you mean 't5_minimal_to_scanned'?; there are auto, "),
        ("infer", "no such pack"),
        ("t5_minimal_to_scanned", "missing a required argument: 'num_heads'; it is written as t5_minimal_to_scanned:"),
        ("t5_minimal_to_scanned:1", "'head_dim'"),
        ("t5_minimal_to_scanned:1,2,3", "too many positional arguments"),
        ("t5_minimal_to_scanned:1,x", "'x' is no whole number"),
        ("t5_minimal_to_scanned:1,0", "head_dim"),
        ("t5_minimal_to_scanned:1,2,depth=3", "'depth'"),
        ("t5_minimal_to_scanned:1:2", "too many colons"),
        ("hf_t5_to_t5x:tie_word_embeddings=maybe", "'maybe' is none of true, false, none"),
        (
            "t5x_to_hf_t5:encoder_attention_type=global",
            "encoder_attention_type is one of ['local', 'transient-global']",
        ),
        ("mesh_tf_to_t5x:inverse", "mesh_tf_to_t5x() has no inverse"),
        ("scaled_fp8_to_float32:inverse", "has no inverse: to quantize is to choose a scale"),
        ("", "no such pack"),
    ],
)
def test_what_is_no_pack_says_how_one_is_written(text, told):
    with pytest.raises(UsageError) as raised:
        pack_argument(text)
    assert told in str(raised.value) and str(raised.value).startswith(f"--rules {text}: ")


def test_every_pack_of_the_package_can_be_named():
    functions = {name for name in ot.rules.__all__ if inspect.isfunction(getattr(ot.rules, name))}
    packs = functions - {"align", "infer", "peft_lora", "register"}
    assert set(pack_names()) == packs
