"""What PEFT's adapter_config.json says, and what of it is refused."""

import json

import pytest

from orbax_t5x.errors import CheckpointNotFoundError, CorruptCheckpointError, UnsupportedCheckpointError
from orbax_t5x.rules.peft_config import LoraConfig, lora_config

# As PEFT 0.17 writes it, with every key.
WRITTEN = {
    "alpha_pattern": {},
    "auto_mapping": None,
    "base_model_name_or_path": "google/flan-t5-small",
    "bias": "none",
    "corda_config": None,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 32,
    "lora_bias": False,
    "lora_dropout": 0.1,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "peft_type": "LORA",
    "qalora_group_size": 16,
    "r": 8,
    "rank_pattern": {},
    "revision": None,
    "target_modules": ["v", "q"],
    "target_parameters": None,
    "task_type": "SEQ_2_SEQ_LM",
    "trainable_token_indices": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
}


def test_a_file_its_directory_and_what_it_holds_are_the_same(tmp_path):
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(WRITTEN))
    expected = LoraConfig(8, 32, targets=("v", "q"))
    (tmp_path / "link").symlink_to(file)
    for config in (WRITTEN, file, str(file), tmp_path, tmp_path / "link"):
        assert lora_config(config) == expected
    assert lora_config(expected.arguments()) == expected
    with pytest.raises(CheckpointNotFoundError):
        lora_config(tmp_path / "none.json")
    file.write_text("[1]")
    with pytest.raises(CorruptCheckpointError, match="adapter_config"):
        lora_config(file)


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"peft_type": "IA3"}, "'IA3'"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"lora_bias": True}, "lora_bias"),
        ({"something_new": {"a": 1}, "use_dora": True}, "something_new"),
    ],
)
def test_what_is_not_known_is_refused_by_name_with_the_way_out(setting, named):
    with pytest.raises(UnsupportedCheckpointError, match=named) as caught:
        lora_config({**WRITTEN, **setting})
    assert "merge_and_unload" in str(caught.value.fix)


@pytest.mark.parametrize("kind", ["PROMPT_TUNING", "PREFIX_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING", "CARTRIDGE"])
def test_adapters_that_nothing_merges_have_another_way_out(kind):
    """PEFT has no `merge_and_unload` for prompts."""
    with pytest.raises(UnsupportedCheckpointError, match=kind) as caught:
        lora_config({"peft_type": kind, "num_virtual_tokens": 8})
    assert "merge_and_unload" not in str(caught.value.fix) and "base model alone" in str(caught.value.fix)


@pytest.mark.parametrize(
    "setting",
    [
        {"r": 0},
        {"r": 2.5},
        {"r": True},
        {"r": None},
        {"lora_alpha": "8"},
        {"lora_alpha": float("nan")},
        {"rank_pattern": {"q": 0}},
        {"rank_pattern": {"(": 1}},
        {"alpha_pattern": ["q"]},
        {"target_modules": 3},
        {"target_modules": "("},
        {"modules_to_save": [1]},
    ],
)
def test_values_that_a_setting_cannot_have(setting):
    with pytest.raises(CorruptCheckpointError, match=next(iter(setting))):
        lora_config({**WRITTEN, **setting})


def test_patterns_are_matched_at_the_end_of_names_as_peft_does():
    config = lora_config({**WRITTEN, "rank_pattern": {"q|k": 2, "block.0.q": 3}, "alpha_pattern": {"^a.b.v": 4.5}})
    assert [config.rank_of(module) for module in ("block.0.q", "k", "block.0.xq", "o")] == [2, 2, 8, 8]
    assert [config.scale_of(module) for module in ("a.b.v", "x.a.b.v", "k")] == [4.5 / 8, 4, 16]
    one = lora_config({**WRITTEN, "target_modules": {"q"}})
    assert [one.is_target(module) for module in ("q", "a.q", "aq")] == [True, True, False]
    regex = lora_config({**WRITTEN, "target_modules": r".*\.(q|v)"})
    assert [regex.is_target(module) for module in ("a.q", "q")] == [True, False]
