"""Caches beside hubs that fail: the commit that the hub names, an error, or the cached commit with one warning.

A generator of states: what the cache has, which revision is asked for, and which request of the hub fails in which way.
"""

import contextlib
import itertools
import shutil
from typing import NamedTuple

import huggingface_hub
import numpy as np
import pytest
import safetensors.numpy
from huggingface_hub import constants
from hypothesis import settings

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointError
from orbax_t5x.extras.web import hub as hub_module
from orbax_t5x.extras.web import web_server
from tests.support.http_store import serving

pytestmark = pytest.mark.slow

# A file's first MiB is read at opening, the second array later.
OLD, NEW = (np.full(1 << 19, value, np.float32) for value in (1, 2))
CACHES = ("nothing", "the old", "the new", "both", "a part of the new")
REVISIONS = ("", "@main", "@{old}", "@{new}")
WAYS = ("reset", "401", "403", "404", "500", "html")
# Which requests fail: none, all, for the commit, for a file on the hub, for the file in its storage.
FAILURES = [("none", "none"), ("all", "unreachable"), *itertools.product(("commit", "file", "storage"), WAYS)]
FAILURES.remove(("storage", "reset"))  # which the hub's package tries again for a minute


class State(NamedTuple):
    """A case; `way` is how requests of a `place` fail."""

    cache: str
    revision: str
    place: str
    way: str


STATES = [State(*one[:2], *one[2]) for one in itertools.product(CACHES, REVISIONS, FAILURES)]


def place_of(request):
    if request.name.startswith("api/"):
        return "commit"
    return "file" if "/resolve/" in request.name else "storage"


class TwoCommits:
    """A hub whose `main` has moved from an old commit to a new one, which alone it still has."""

    def __init__(self, hub):
        self.hub = hub
        self.old = self.publish(OLD, hub.commit)
        self.new = None

    def publish(self, values, commit):
        self.hub.files.clear()
        self.hub.files["config.json"] = b"{}"
        self.hub.files["model.safetensors"] = safetensors.numpy.save({"a": values, "b": values})
        self.hub.commit, self.hub.revisions = commit, ("main", commit)
        return commit

    def cache(self, what):
        """Fills the cache as the hub's own package does."""
        shutil.rmtree(constants.HF_HUB_CACHE, ignore_errors=True)
        self.publish(OLD, self.old)
        if what in ("the old", "both"):
            self.fetch(self.old)
        self.new = self.publish(NEW, f"{int(self.old, 16) + (1 << 40):040x}")
        if what in ("the new", "both"):
            self.fetch(self.new)
        elif what == "a part of the new":
            self.fetch(self.new, allow_patterns=["config.json"])

    def fetch(self, commit, **keywords):
        for revision in (None, commit):
            huggingface_hub.snapshot_download("google/tiny", revision=revision, endpoint=self.hub.url, **keywords)

    @contextlib.contextmanager
    def failing(self, state):
        def fault(request):
            return state.way if place_of(request) == state.place else None

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.hub, "fault", fault)
            patch.setattr(self.hub.storage, "fault", fault)
            if state.place == "all":
                with serving() as gone:
                    patch.setenv("HF_ENDPOINT", gone.url)
            yield


def expected(state):
    """The outcomes that are right: "old" and "new" for values, with "warned" of the cache, or "error"."""
    cached = {"the old": ("old",), "the new": ("new",), "both": ("old", "new")}.get(state.cache, ())
    if state.revision == "@{old}":  # which the hub has no longer
        return {"old"} if "old" in cached else {"error"}
    if state.revision == "@{new}" and "new" in cached:
        return {"new"}
    if state.place == "all" and cached and state.revision != "@{new}":
        return {f"{cached[-1]} warned"}  # what `main` was when the cache was filled
    if state.place in ("all", "commit"):
        return {"error"}
    if state.place == "none" or "new" in cached:
        return {"new"}
    return {"new", "error"}  # tried again, or read whole in another way


def outcome(state, commits, caplog):
    caplog.clear()
    path = "hf://google/tiny" + state.revision.format(old=commits.old, new=commits.new)
    try:
        with commits.failing(state), ot.open_checkpoint(path) as checkpoint:
            values = [checkpoint.leaves[name].get() for name in ("a", "b")]
    except CheckpointError:
        return "error"
    name = next(name for name, value in (("old", OLD), ("new", NEW)) if np.array_equal(values[0], value))
    np.testing.assert_array_equal(values[1], values[0])  # never of two commits
    warned = [record.getMessage() for record in caplog.records if "its cache has the commit" in record.getMessage()]
    assert all(getattr(commits, name) in text for text in warned) and len(warned) <= 1
    return f"{name} warned" if warned else name


@pytest.mark.parametrize("cache", CACHES)
def test_silence_and_failures_never_change_a_commit(cache, redirecting_hub, caplog, monkeypatch):
    """With more examples by `make fuzz` all states; else one of five."""
    monkeypatch.setattr(web_server, "FIRST_DELAY_SECS", 0.0)
    commits = TwoCommits(redirecting_hub)
    found = {}
    states = [state for state in STATES if state.cache == cache]
    for state in states if settings.default.max_examples > 100 else states[::5]:
        hub_module._COMMITS.clear()
        commits.cache(cache)
        found[state] = outcome(state, commits, caplog)
    assert {state: one for state, one in found.items() if one not in expected(state)} == {}
