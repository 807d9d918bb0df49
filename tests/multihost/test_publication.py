"""Publications of openings: read as they were written, and removed when all have read them, or by the opener."""

import threading

import pytest

from orbax_t5x.multihost import publication
from orbax_t5x.multihost.publication import Publication, begun_publications
from tests.support.key_values import KeyValues

DATA = bytes(range(256)) * 5000  # more than a piece


@pytest.fixture
def store():
    return KeyValues()


def written(store, name="open", number=0, is_collective=True):
    made = Publication(store, name, number)
    made.begin()
    made.write({"kind": 1}, DATA)
    made.keep(is_collective)
    return made


def test_the_last_of_all_consumers_removes_it(store):
    made = written(store)
    assert begun_publications(store, "open") == [made] and begun_publications(store, "op") == []
    head = made.head(1.0)
    assert head["kind"] == 1 and head["pieces"] == 2 and made.data(head) == DATA
    made.consume(3)
    made.consume(3)
    assert not made.is_removed() and made.data(head) == DATA
    made.consume(3)
    assert made.is_removed() and store.held == {} and made.head(1.0) is None and made.data(head) is None


def test_bytes_that_were_not_written_are_an_error(store):
    made = written(store)
    (second,) = [key for key in store.held if key.endswith("/1")]
    store.held[second] = b"others"
    with pytest.raises(ValueError, match="other bytes"):
        made.data(made.head(1.0))


def test_a_call_that_others_may_not_make_is_removed_after_a_while(store, monkeypatch):
    monkeypatch.setattr(publication, "_RECENT_SECS", 0.0)
    removed = threading.Event()
    store.on_delete = lambda key: removed.set() if not store.held else None
    made = written(store, is_collective=False)
    assert removed.wait(60) and made.is_removed()


def test_of_collective_calls_that_some_do_not_make_the_mark_is_left(store, monkeypatch):
    monkeypatch.setattr(publication, "_KEPT", 2)
    monkeypatch.setattr(publication, "_kept", publication.collections.deque())
    first, second, third = (written(store, number=number) for number in range(3))
    assert [one.is_expired for one in begun_publications(store, "open")] == [True, False, False]
    assert first.head(1.0) is None and first.is_removed(), "whoever waits for it opens for itself"
    second.consume(1)
    fourth = written(store, number=3)
    assert [one.is_expired for one in begun_publications(store, "open")] == [True, False, False]
    for one in (first, third, fourth):
        one.consume(1)
    assert store.held == {}
