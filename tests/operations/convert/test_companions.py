"""Configurations and tokenizers that are copied from another model."""

import pytest

from orbax_t5x.errors import CheckpointNotFoundError, LimitExceededError, UnsafeCheckpointError
from orbax_t5x.operations.convert import companions
from orbax_t5x.operations.convert.companions import read_companions
from tests.support.http_store import serving

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
    monkeypatch.setattr(companions, "_MOST_BYTES", 10)
    (tmp_path / "config.json").write_bytes(FILES["config.json"])
    with pytest.raises(LimitExceededError):
        read_companions(str(tmp_path))
