"""Paths of bundles: prefixes, directories, checkpoint files, links."""

import importlib
import logging
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import orbax_t5x as ot
from orbax_t5x.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsafeCheckpointError,
    UnsupportedCheckpointError,
)
from orbax_t5x.readers.tf_bundle.locate import unescape
from orbax_t5x.readers.tf_bundle.open import open_tf_bundle
from tests.support.bundle_writer import bundle_of, shard_path


def test_every_way_to_name_one(goldens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = goldens / "tf_bundle/t5_1_1_f32"
    prefix = directory / "model.ckpt-1000000"
    ways = [
        directory,
        f"{directory}/",
        prefix,
        str(prefix),
        f"{prefix}.index",
        shard_path(prefix, 1, 2),
        directory / "checkpoint",
    ]
    for path in ways:
        with open_tf_bundle(path) as checkpoint:
            assert checkpoint.path == str(prefix) and len(checkpoint.leaves) == 143
    monkeypatch.chdir(directory)
    for path in (".", "model.ckpt-1000000", "model.ckpt-1000000.index", "checkpoint"):
        with open_tf_bundle(path) as checkpoint:
            assert checkpoint.path == str(prefix)


def test_a_directory_with_one_bundle_needs_no_checkpoint_file(bundle: Path) -> None:
    assert open_tf_bundle(bundle.parent).step == 5
    bundle_of({"x": np.arange(4)}).write(bundle.parent, "model.ckpt-6")
    with pytest.raises(
        CheckpointNotFoundError, match=r"2 bundles \(model.ckpt-5.index, model.ckpt-6.index\): name one"
    ):
        open_tf_bundle(bundle.parent)


def state(directory: Path, text: str) -> Path:
    (directory / "checkpoint").write_text(text)
    return directory


@pytest.mark.parametrize(
    "text",
    [
        'model_checkpoint_path: "model.ckpt-5"\nall_model_checkpoint_paths: "model.ckpt-5"\n',
        "  model_checkpoint_path : 'model.ckpt-5'",
        'all_model_checkpoint_paths: "other"\nmodel_checkpoint_path: "./model.ckpt-5"',
        'model_checkpoint_path: "model\\056ckpt-5"',
        'model_checkpoint_path: "{run}/model.ckpt-5"',
    ],
)
def test_checkpoint_files(bundle: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    bundle_of({"x": np.arange(4)}).write(bundle.parent, "model.ckpt-6")
    checkpoint = open_tf_bundle(state(bundle.parent, text.replace("{run}", str(bundle.parent))))
    assert checkpoint.step == 5 and "rebased_from" not in checkpoint.metadata
    assert not caplog.records


@given(st.binary(), st.text(), st.booleans())
def test_escapes_are_those_of_protobuf(data: bytes, text: str, as_utf8: bool) -> None:
    text_encoding = importlib.import_module("google.protobuf.text_encoding")
    for value in (data, text.encode(), bytes(range(256))):
        escaped = text_encoding.CEscape(value, as_utf8).encode()
        assert unescape(escaped) == value == text_encoding.CUnescape(escaped.decode())
    assert unescape(rb"\x4A\x4g\a\b\?") == text_encoding.CUnescape(r"\x4A\x4g\a\b?")


@pytest.mark.parametrize("text", [r"\777", r"\q", r"\xg"])
def test_unknown_escapes_are_damage(bundle: Path, text: str) -> None:
    with pytest.raises(CorruptCheckpointError, match="no text"):
        open_tf_bundle(state(bundle.parent, f'model_checkpoint_path: "{text}"'))


def test_a_relative_path_may_go_down(bundle: Path) -> None:
    assert open_tf_bundle(state(bundle.parent.parent, 'model_checkpoint_path: "run/model.ckpt-5"')).step == 5


def test_an_absolute_path_is_rebased_with_a_warning(bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    state(bundle.parent, 'model_checkpoint_path: "/data/run/model.ckpt-5"')
    with caplog.at_level(logging.WARNING):
        checkpoint = open_tf_bundle(bundle.parent)
    assert checkpoint.path == str(bundle)
    assert checkpoint.metadata["rebased_from"] == "/data/run/model.ckpt-5"
    assert "/data/run/model.ckpt-5" in caplog.text


def test_an_absolute_path_is_never_followed(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = bundle_of({"secret": np.arange(4)}).write(tmp_path / "other", "model.ckpt-7")
    state(bundle.parent, f'model_checkpoint_path: "{other}"')
    with pytest.raises(CheckpointNotFoundError, match=r"model.ckpt-7.*there is no model.ckpt-7.index"):
        open_tf_bundle(bundle.parent)


@pytest.mark.parametrize("said", ["../../x", "../run/model.ckpt-5", "/a/../b", "a/../../b", "a\\\\..\\\\b", "%2e%2e/b"])
def test_a_checkpoint_file_that_leads_upwards_is_unsafe(bundle: Path, said: str) -> None:
    with pytest.raises(UnsafeCheckpointError):
        open_tf_bundle(state(bundle.parent, f'model_checkpoint_path: "{said}"'))


@pytest.mark.parametrize("said", ["/data/", ".", "./"])
def test_a_checkpoint_file_that_names_no_file(bundle: Path, said: str) -> None:
    with pytest.raises((CorruptCheckpointError, UnsafeCheckpointError)):
        open_tf_bundle(state(bundle.parent, f'model_checkpoint_path: "{said}"'))


def test_a_checkpoint_file_of_another_kind_is_not_ours(bundle: Path) -> None:
    (bundle.parent / "checkpoint").write_bytes(b"\x82\xa7version\x03")
    assert open_tf_bundle(bundle.parent).step == 5
    Path(f"{bundle}.index").unlink()
    with pytest.raises(CheckpointNotFoundError, match="no 'checkpoint' file with a model_checkpoint_path, and nothing"):
        open_tf_bundle(bundle.parent)


def test_a_directory_beside_a_bundle_of_the_same_name(bundle: Path) -> None:
    bundle.mkdir()
    assert open_tf_bundle(bundle).path == str(bundle)


def test_nothing_there(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path / "nothing.index", tmp_path):
        with pytest.raises(CheckpointNotFoundError, match="no TensorFlow bundle"):
            open_tf_bundle(path)
    (tmp_path / "file").write_bytes(b"hello")
    with pytest.raises(CheckpointNotFoundError, match=r"there is no .*file\.index"):
        open_tf_bundle(tmp_path / "file")


def test_a_shard_without_its_index(bundle: Path) -> None:
    Path(f"{bundle}.index").unlink()
    with pytest.raises(CheckpointNotFoundError, match="index is missing"):
        open_tf_bundle(shard_path(bundle))


def test_symlinks_to_the_files_of_a_bundle(bundle: Path, tmp_path: Path) -> None:
    """What the caller names is trusted; what lies beside it is followed only inside."""
    (tmp_path / "link").symlink_to(bundle.parent)
    assert open_tf_bundle(tmp_path / "link").path == str(bundle)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/there.index").symlink_to(f"{bundle}.index")
    assert open_tf_bundle(tmp_path / "elsewhere/there.index").path == str(bundle)
    with pytest.raises(UnsafeCheckpointError):
        open_tf_bundle(tmp_path / "elsewhere/there")


@pytest.mark.parametrize("name", ["model.ckpt-3", "model.ckpt-3-00000-of-00001"])
def test_v1_checkpoints_are_refused_with_a_hint(bundle: Path, name: str) -> None:
    index = Path(f"{bundle}.index")
    index.rename(bundle.parent / name)
    for path in (bundle.parent / name, bundle.parent / "model.ckpt-3"):
        with pytest.raises(UnsupportedCheckpointError, match=r"V1 checkpoint.*write_version"):
            open_tf_bundle(path)
    if name == "model.ckpt-3":
        with pytest.raises(UnsupportedCheckpointError, match="V1 checkpoint"):
            open_tf_bundle(state(bundle.parent, 'model_checkpoint_path: "model.ckpt-3"'))


def test_the_bundles_of_tensorflow(goldens):
    bundles = goldens / "tf_bundle"
    if not bundles.exists():
        pytest.fail("the golden TensorFlow bundles are missing")
    directory = bundles / "t5_1_1_f32"
    prefix = directory / "model.ckpt-1000000"
    for path in (directory, prefix, f"{prefix}.index", directory / "checkpoint"):
        with ot.open_checkpoint(path) as checkpoint:
            assert (checkpoint.format, checkpoint.step) == ("tf_bundle", 1000000)
    with pytest.raises(UnsupportedCheckpointError, match="has no items"):
        ot.open_checkpoint(directory, item="state")


def test_a_damaged_bundle_is_still_one(tmp_path):
    (tmp_path / "model.ckpt-7.index").write_bytes(b"short")
    (tmp_path / "model.ckpt-7.data-00000-of-00001").write_bytes(b"")
    for path in (tmp_path, tmp_path / "model.ckpt-7", tmp_path / "model.ckpt-7.index"):
        with pytest.raises(ot.errors.CorruptCheckpointError, match=r"model\.ckpt-7\.index"):
            ot.open_checkpoint(path)
