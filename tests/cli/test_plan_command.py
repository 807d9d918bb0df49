"""`plan`: what a restore would do."""

import json
import os
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from orbax_t5x.cli import inspect_command

BUNDLE = Path(inspect_command.__file__).parent / "demo_data" / "model.ckpt-1000000"


def test_plan_translates_bundles(run):
    code, out, _ = run("plan", BUNDLE)
    assert code == 0 and "261 leaves" in out and "143 read · 118 constant" in out
    assert "target/decoder/layers_{0,1}/mlp/wi_0/kernel ×2" in out
    assert "decoder/block_{000,001}/layer_002/DenseReluDense/wi_0/kernel" in out


def test_plan_without_translation(run):
    code, out, _ = run("plan", "--no-translate", BUNDLE)
    assert code == 0 and "143 leaves" in out and "same name" in out


def test_plan_json(run):
    code, out, _ = run("plan", "--json", BUNDLE)
    said = json.loads(out)
    assert code == 0 and len(said["entries"]) == 261 and said["bytes_to_read"] == 75_656


def test_plan_for_another_checkpoint(run, layers, tmp_path):
    other = tmp_path / "other.safetensors"
    safetensors.numpy.save_file({f"blocks_{i}/kernel": np.zeros((4, 8), np.float32) for i in range(3)}, other)
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps([[r"blocks_(\d+)/kernel", r"layers_\1/wi_1/kernel"]]))
    code, out, err = run("plan", layers, "--target", other, "--map", rules, "--no-strict")
    assert code == 0, err
    assert "blocks_{0…2}/kernel ×3" in out and "layers_{0…2}/wi_1/kernel" in out


def test_plan_with_problems(run, layers, tmp_path):
    other = tmp_path / "other.safetensors"
    arrays = {f"layers_{i}/wi_0/kernel": np.zeros((4, 9), np.float32) for i in range(3)}
    safetensors.numpy.save_file({**arrays, "scale": np.zeros(4, ml_dtypes.float8_e4m3fn)}, other)
    code, out, err = run("plan", layers, "--target", other)
    assert code == 1 and not out and "Traceback" not in err
    assert "[shape] layers_{0…2}/wi_0/kernel ×3: the checkpoint has shape (4, 8), the target (4, 9)" in " ".join(
        err.split()
    )
    assert "pass --no-strict to leave them unread" in " ".join(err.split()) and len(err.splitlines()) < 60
    assert not re.search(r"strict=|allow_lossy_cast=", err)
    code, out, _ = run("plan", layers, "--target", other, "--json")
    kinds = {problem["kind"] for problem in json.loads(out)["problems"]}
    assert code == 1 and kinds == {"shape", "dtype", "leftover"}


@pytest.mark.slow
def test_plan_of_a_bundle_for_translated_names_without_translation(run, tmp_path):
    assert run("convert", BUNDLE, tmp_path / "converted")[0] == 0
    code, _, err = run("plan", BUNDLE, "--no-translate", "--target", tmp_path / "converted")
    assert code == 1 and "Fix: pass --translate" in " ".join(err.split())
    assert run("plan", BUNDLE, "--target", tmp_path / "converted")[0] == 0


def test_plan_of_a_bundle_for_names_of_a_bundle(run):
    code, _, err = run("plan", BUNDLE, "--target", BUNDLE)
    assert code == 1 and "1 problem" in err and "Fix: pass --no-translate" in err
    assert run("plan", BUNDLE, "--no-translate", "--target", BUNDLE)[0] == 0


def test_fixes_are_options_or_say_that_they_are_not(run, layers, tmp_path):
    """Of dtypes: one option permits what rounds; what is cut to an integer has none."""
    other = tmp_path / "other.safetensors"
    first, second, third = (f"layers_{i}/wi_0/kernel" for i in range(3))
    arrays = {first: np.zeros((4, 8), np.float16), second: np.zeros((4, 8), np.int32)}
    arrays[f"x_{third}"] = np.zeros((4, 8), np.float32)
    safetensors.numpy.save_file(arrays, other)
    code, _, err = run("plan", layers, "--target", other)
    text = " ".join(err.split())
    assert code == 1
    assert "Fix: pass --allow-lossy-cast" in text
    assert f"Fix: in Python, add transforms=[ot.transforms.Cast('{second}', 'int32')]" in text
    assert f"x_{third}: the checkpoint has no such leaf; closest: {third}" in text


@pytest.mark.slow
def test_plan_asks_for_what_the_record_disagrees_with(run, tmp_path):
    """A checkpoint written by one chain, planned with another: the answer is an option."""
    assert run("convert", BUNDLE, tmp_path / "out")[0] == 0
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps([["target/encoder/encoder_norm/scale", "target/decoder/decoder_norm/scale"]]))
    arguments = ["plan", tmp_path / "out", "--target", tmp_path / "out", "--map", rules, "--no-strict"]
    code, out, err = run(*arguments, "--resuming", "no")
    assert code == 0 and "target/decoder/decoder_norm/scale" in out, err
    code, out, _ = run(*arguments, "--resuming", "yes", "--explain", "target/encoder/encoder_norm/scale")
    assert code == 0 and "the names match" in out
    _, _, err = run(*arguments)
    assert "is_resuming" not in err


def test_plan_explains_a_leaf(run):
    code, out, _ = run("plan", BUNDLE, "--explain", "target/token_embedder/embedding")
    assert code == 0 and "shared/embedding  float32[128,16]" in out and "8.00 KiB in 1 box for 1 shard here" in out
    code, _, err = run("plan", BUNDLE, "--explain", "target/token_embedder/embeddin")
    assert code == 2 and "closest: target/token_embedder/embedding" in err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "not JSON"),
        ('{"a": "b"}', "not an object"),
        ('["ab"]', 'not "ab"'),
        ('[["a", 1]]', 'not ["a", 1]'),
        ('[["a", "b"], ["(", null]]', "rule 1: '(' is no regular expression"),
    ],
)
def test_rules_that_are_none(run, layers, tmp_path, text, told):
    rules = tmp_path / "rules.json"
    rules.write_text(text)
    code, _, err = run("plan", layers, "--target", layers, "--map", rules)
    assert code == 2 and told in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("option", ["--map", "--config"])
@pytest.mark.parametrize("kind", ["fifo", "device", "directory"])
def test_what_is_no_file_is_refused_at_once(run, layers, tmp_path, option, kind):
    path = {"fifo": tmp_path / "fifo", "device": "/dev/zero", "directory": tmp_path}[kind]
    if kind == "fifo":
        os.mkfifo(path)
    target = ("--target", layers) if option == "--map" else ("--format", "safetensors")
    code, _, err = run("convert", layers, tmp_path / "out", *target, option, path)
    assert code == 2 and option in err and len(err.splitlines()) == 1


def test_rules_need_a_target_and_a_file(run, layers, tmp_path):
    code, _, err = run("plan", layers, "--target", layers, "--map", tmp_path / "rules.json")
    assert code == 2 and "No such file" in err
    (tmp_path / "rules.json").write_text('[["a", "b"]]')
    code, _, err = run("plan", layers, "--map", tmp_path / "rules.json")
    assert code == 2 and "--map needs --target" in err
