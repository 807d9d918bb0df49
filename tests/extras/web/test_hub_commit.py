"""What a revision of the hub is: found by one bounded request, whatever the hub answers."""

import json
import sys

import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointError, CheckpointNotFoundError, LimitExceededError, UnsupportedCheckpointError
from orbax_t5x.extras.web import hub_commit
from orbax_t5x.extras.web.hub import parse_hub_path
from orbax_t5x.extras.web.hub_commit import find_commit, known_commit
from tests.support.hub_server import model

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
ODD += [json.dumps({"sha": SHA, "siblings": [{"rfilename": 3}]}).encode()]


def test_answers_of_another_form(hub, monkeypatch):
    for answer in ODD:
        monkeypatch.setattr(hub, "answer_to", lambda name, query, answer=answer: answer)
        with pytest.raises(CheckpointError) as caught:
            find_commit(parse_hub_path("hf://google/tiny"))
        assert caught.value.path == "hf://google/tiny"


def test_sizes_that_are_none_are_unknown(hub, monkeypatch):
    sizes = [3, -3, "3", 1 << 63, None, True, 2.0]
    files = [{"rfilename": str(number), "size": size} for number, size in enumerate(sizes)]
    answer = json.dumps({"id": "google/tiny", "sha": SHA, "siblings": files}).encode()
    monkeypatch.setattr(hub, "answer_to", lambda name, query: answer)
    assert list(find_commit(parse_hub_path("hf://google/tiny")).sizes.values()) == [3, *[None] * 6]


def test_the_list_of_files_is_bounded(hub, monkeypatch):
    """However much the hub sends, no more than the limit is kept."""
    files = [{"rfilename": f"file-{number}", "size": 1} for number in range(10_000)]
    answer = json.dumps({"sha": SHA, "siblings": files}).encode()
    monkeypatch.setattr(hub, "answer_to", lambda name, query: answer)
    monkeypatch.setattr(hub_commit, "Limits", lambda: ot.Limits(index_bytes=len(answer) - 1))
    with pytest.raises(LimitExceededError, match=r"Limits\.index_bytes") as caught:
        find_commit(parse_hub_path("hf://google/tiny"))
    assert caught.value.path == "hf://google/tiny"
    monkeypatch.setattr(hub_commit, "Limits", lambda: ot.Limits(index_bytes=len(answer)))
    assert len(find_commit(parse_hub_path("hf://google/tiny")).sizes) == 10_000


def test_a_hub_that_does_not_answer(hub, monkeypatch):
    monkeypatch.setattr(hub_commit, "Limits", lambda: ot.Limits(io_timeout_secs=0.3))
    hub.fault = lambda request: "stall"
    with pytest.raises(ConnectionError):
        find_commit(parse_hub_path("hf://google/tiny"))
    assert len(hub.log) == 1


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UnsupportedCheckpointError, match=r"pip install 'orbax-t5x\[hf\]'"):
        ot.open_checkpoint("hf://google/tiny")
