"""What a revision of the hub is: found by one bounded request, whatever the hub answers."""

import json

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import constants

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointError, CheckpointNotFoundError
from orbax_t5x.storage.remote import hub_commit
from orbax_t5x.storage.remote.hub import parse_hub_path
from orbax_t5x.storage.remote.hub_commit import find_commit, known_commit
from tests.support.hub_server import W, model

pytestmark = pytest.mark.slow


@pytest.fixture
def hub(redirecting_hub):
    model(redirecting_hub)
    return redirecting_hub


def test_revisions(hub):
    for revision in ("", "@v1", "@refs/pr/3", f"@{hub.commit}"):
        commit = find_commit(parse_hub_path(f"hf://google/tiny{revision}"))
        assert (commit.revision, set(commit.sizes)) == (hub.commit, set(hub.files))
    assert known_commit(f"hf://google/tiny@{hub.commit}") == commit
    assert {request.authorization for request in hub.log} == {"Bearer odd-t0ken"}
    for path in ("hf://google/other", "hf://google/tiny@v9"):
        with pytest.raises(CheckpointNotFoundError):
            find_commit(parse_hub_path(path))


SHA = "0" * 40
ODD = [b"[]", b"{", b"{}", b'{"sha": 3}', b'{"sha": "a/b"}', b'{"sha": "a", "siblings": [3]}', b"\xff", b"[" * 99_999]
ODD += [json.dumps({"sha": SHA, "siblings": [{"rfilename": 3}]}).encode(), b'{"sha": "a", "sha": "b"}']


def test_answers_of_another_form(hub, monkeypatch):
    for answer in ODD:
        monkeypatch.setattr(hub, "answer_to", lambda name, query, answer=answer: answer)
        with pytest.raises(CheckpointError) as caught:
            find_commit(parse_hub_path("hf://google/tiny"))
        assert caught.value.path == "hf://google/tiny"


def test_sizes_that_are_none_are_unknown(hub, monkeypatch):
    sizes = [3, -3, "3", 1 << 63, None, True, 2.0]
    files = [{"rfilename": str(number), "size": size} for number, size in enumerate(sizes)]
    answer = json.dumps({"sha": SHA, "siblings": files}).encode()
    monkeypatch.setattr(hub, "answer_to", lambda name, query: answer)
    assert list(find_commit(parse_hub_path("hf://google/tiny")).sizes.values()) == [3, *[None] * 6]


def test_an_answer_that_is_too_long_or_never_comes(hub, monkeypatch):
    """The package, whose answers have no bound, is not asked then, but its cache is enough."""
    monkeypatch.setattr(hub_commit, "Limits", lambda: ot.Limits(io_timeout_secs=0.3))
    huggingface_hub.snapshot_download("google/tiny", endpoint=hub.url)
    for fault in ("stall", "chunks without end", "a page without end", "a gzip bomb", "no HTTP"):
        hub.fault = lambda request, fault=fault: fault
        hub.forget()
        with ot.open_checkpoint("hf://google/tiny") as checkpoint:
            np.testing.assert_array_equal(checkpoint.leaves["w"].get(), W)
        with pytest.raises(CheckpointError):
            ot.open_checkpoint("hf://google/tiny@v1")
        assert len(hub.log) == 2
        assert hub.wait_until_closed(30)


def test_without_a_network_nothing_is_requested(hub, monkeypatch):
    # The package before 1.0 asks for the setting when it makes a session.
    new_session = getattr(huggingface_hub.utils, "reset_sessions", lambda: None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    new_session()
    try:
        with pytest.raises(CheckpointError):
            ot.open_checkpoint("hf://google/tiny")
    finally:
        new_session()
    assert not hub.log
