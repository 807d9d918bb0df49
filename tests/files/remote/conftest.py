"""Hubs that send on to another server, and an environment without proxies."""

import pytest

from tests.support.hub_server import RedirectingHub, Storage


@pytest.fixture
def redirecting_hub(tmp_path, monkeypatch):
    from huggingface_hub import constants

    storage = Storage()
    server = RedirectingHub(storage)
    storage.files = server.files
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", "odd-t0ken")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    yield server
    server.close()
    storage.close()


@pytest.fixture
def no_proxies(monkeypatch):
    """The environment names no proxies."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
