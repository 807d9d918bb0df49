"""Openings that a process takes of those that the opener has made, and what it does where there are none."""

import threading

import pytest

from orbax_t5x.errors import CheckpointIOError
from orbax_t5x.multihost import openings
from orbax_t5x.multihost.groups import ProcessGroup
from orbax_t5x.multihost.publication import Publication
from tests.support.key_values import KeyValues

NOT_ABANDONED = threading.Event()
GROUP = ProcessGroup((0, 1), 0, "", 1)


def begun(store, name, count):
    made = [Publication(store, name, number) for number in range(count)]
    for one in made:
        one.begin()
    return made


def test_after_calls_that_only_the_opener_has_made_the_newest_is_taken():
    store = KeyValues()
    made = begun(store, "newest", 3)
    for one in made:  # as many calls as the opener has made wait for none of them
        assert openings._taken(store, "newest", "path", GROUP, False, NOT_ABANDONED) == (made[2], [one])


def test_a_collective_call_consumes_all_that_were_made(monkeypatch):
    store = KeyValues()
    made = begun(store, "collective", 2)
    assert openings._taken(store, "collective", "path", GROUP, True, NOT_ABANDONED) == (made[1], made)
    monkeypatch.setattr(openings, "_COLLECTIVE_BEGIN_SECS", 0.0)
    assert openings._taken(store, "collective", "path", GROUP, True, NOT_ABANDONED) is None


def test_an_opening_that_is_removed_meanwhile_is_made_again():
    store = KeyValues()
    (one,) = begun(store, "removed", 1)
    store.key_value_delete(one._begun)
    assert openings._transcript(one, "path", GROUP, NOT_ABANDONED) is None


@pytest.mark.parametrize("data", [b"no zlib", openings.zlib.compress(b"x")[:-1], openings.zlib.compress(b"x")])
def test_damage_is_an_error_of_the_opening(data):
    one = Publication(KeyValues(), "damaged", 0)
    one.write({"alone": False}, data)
    with pytest.raises(CheckpointIOError, match="process 0 sent of the checkpoint is damaged"):
        openings._transcript(one, "path", GROUP, NOT_ABANDONED)
