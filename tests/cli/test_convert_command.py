"""`convert`: a checkpoint of any format becomes another."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.cli import convert_command, inspect_command
from orbax_t5x.cli.convert_command import read_companions
from orbax_t5x.errors import CheckpointNotFoundError, LimitExceededError, UnsafeCheckpointError
from tests.support.http_store import serving

BUNDLE = Path(inspect_command.__file__).parent / "demo_data" / "model.ckpt-1000000"


@pytest.mark.slow
def test_convert_a_bundle_is_what_stock_orbax_reads(run, tmp_path, goldens):
    code, out, err = run("convert", BUNDLE, tmp_path / "out")
    assert code == 0 and not err and out.startswith(f"261 leaves (74.3 KiB) in {tmp_path}/out, in ")
    tree = ocp.PyTreeCheckpointer().restore(tmp_path / "out")
    with np.load(goldens / "importer" / "t5_1_1_f32.npz") as expected:
        embedding = tree["target"]["token_embedder"]["embedding"]
        np.testing.assert_array_equal(embedding, expected["target/token_embedder/embedding"])


@pytest.mark.slow
def test_convert_never_overwrites_unasked(run, tmp_path):
    assert run("convert", BUNDLE, tmp_path / "out")[0] == 0
    code, _, err = run("convert", BUNDLE, tmp_path / "out")
    assert code == 1 and "--overwrite" in err
    code, out, _ = run("convert", BUNDLE, tmp_path / "out", "--overwrite", "--dtype", "bfloat16", "--json")
    assert code == 0 and json.loads(out)["leaves"] == 261
    with ot.open_checkpoint(tmp_path / "out") as checkpoint:
        assert checkpoint.leaves["target/token_embedder/embedding"].dtype == ml_dtypes.bfloat16
        assert checkpoint.leaves["state/param_states/token_embedder/embedding/v_row"].dtype == np.float32


def test_convert_names_what_orbax_cannot_store(run, tmp_path):
    path = tmp_path / "empty.safetensors"
    safetensors.numpy.save_file({"none": np.zeros((0, 2), np.float32), "some": np.ones(2, np.float32)}, path)
    code, _, err = run("convert", path, tmp_path / "out")
    assert code == 1 and "'none'" in err and "--on-unsupported skip" in err
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["empty.safetensors"]
    code, out, _ = run("convert", path, tmp_path / "out", "--on-unsupported", "skip")
    assert code == 0 and out.startswith("1 leaf (8 B)")
    assert "left out, because Orbax cannot store it:\n  none  float32[0,2]\n" in out


@pytest.mark.parametrize("format", ["orbax", "safetensors"])
def test_what_was_written_is_no_question_of_marks(run, layers, tmp_path, format):
    def refuse(path, *, limits):
        raise AssertionError(path)

    marks = [ot.Mark("_METADATA"), ot.Mark("*.safetensors")]
    with ot.register_format(ot.Format("greedy", refuse, directory=marks)):
        code, out, err = run("convert", layers, tmp_path / "out", "--format", format)
    assert code == 0 and out.startswith("8 leaves") and not err


def test_convert_refuses_an_unknown_dtype(run, tmp_path):
    code, _, err = run("convert", BUNDLE, tmp_path / "out", "--dtype", "bflat16")
    assert code == 2 and "bflat16" in err and not (tmp_path / "out").exists()


def test_convert_copies_a_models_files_and_replaces_them_again(run, tmp_path):
    path = tmp_path / "a.safetensors"
    safetensors.numpy.save_file({"some": np.ones(2, np.float32)}, path)
    (tmp_path / "model").mkdir()
    for name, data in (("config.json", "{}"), ("spiece.model", "tokens"), ("notes.txt", "x")):
        (tmp_path / "model" / name).write_text(data)
    command = ("convert", path, tmp_path / "out", "--from", tmp_path / "model")
    assert run(*command, "--format", "safetensors")[0] == 0
    code, out, _ = run(*command, "--format", "safetensors", "--overwrite")
    assert code == 0 and "also needs" not in out
    assert {one.name: one.read_text() for one in (tmp_path / "out").iterdir() if one.suffix != ".safetensors"} == {
        "config.json": "{}",
        "spiece.model": "tokens",
    }
    code, _, err = run(*command, "--overwrite")
    assert code == 2 and "--from is for --format safetensors" in err
    code, _, err = run("convert", path, tmp_path / "b", "--format", "safetensors", "--from", tmp_path / "out" / "none")
    assert code == 1 and not (tmp_path / "b").exists()


@pytest.mark.slow
def test_convert_says_only_what_was_applied(run, tmp_path, caplog):
    assert "mapped by Translate()" in run("convert", BUNDLE, tmp_path / "t5x")[1]
    code, out, _ = run("convert", tmp_path / "t5x", tmp_path / "again", "--translate")
    assert code == 0 and "are not applied again" in caplog.text
    assert "mapped by" not in out and "names, shapes and dtypes are the source's" in out
    code, out, _ = run("convert", tmp_path / "t5x", tmp_path / "third", "--translate", "--json")
    assert json.loads(out)["rules"] == []


FILES = {"config.json": b'{"model_type": "t5"}', "spiece.model": b"\x0a\x00tokens"}


def test_known_files_are_read_and_no_others(tmp_path):
    for name, data in (FILES | {"README.md": b"x", "model.safetensors": b"x"}).items():
        (tmp_path / name).write_bytes(data)
    assert read_companions(str(tmp_path)) == FILES
    with serving(tmp_path) as server:
        assert read_companions(server.url) == FILES


def test_a_directory_without_any_is_refused(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match=r"none of config\.json"):
        read_companions(str(tmp_path))


def test_links_that_lead_out_and_large_files_are_refused(tmp_path, monkeypatch):
    (tmp_path / "secret").write_text("x")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").symlink_to(tmp_path / "secret")
    with pytest.raises((UnsafeCheckpointError, CheckpointNotFoundError)):
        read_companions(str(tmp_path / "model"))
    monkeypatch.setattr(convert_command, "_MOST_BYTES", 10)
    (tmp_path / "config.json").write_bytes(FILES["config.json"])
    with pytest.raises(LimitExceededError):
        read_companions(str(tmp_path))
