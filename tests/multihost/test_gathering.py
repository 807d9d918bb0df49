"""Bytes of all processes on one: sent once by each, read once, and removed."""

import collections

import pytest

from orbax_t5x.multihost import gathering
from tests.support.key_values import KeyValues


class CountedKeyValues(KeyValues):
    def __init__(self):
        super().__init__()
        self.counted = collections.Counter()

    def __getattribute__(self, name):
        if name.startswith(("key_value", "blocking")):
            self.counted[name] += 1
        return super().__getattribute__(name)


@pytest.fixture
def store(monkeypatch):
    made = CountedKeyValues()
    monkeypatch.setattr(gathering, "key_value_store", lambda: made)
    return made


@pytest.mark.parametrize("count", [1, 2, 4, 64])
def test_messages_grow_with_the_processes_and_not_with_their_square(store, count):
    data = [bytes([process]) * 1000 for process in range(count)]
    for process in reversed(range(count)):
        gathering.send("/root/1", process, data[process])
    gathering.send("/root/2", 0, b"another")
    assert store.counted == {"key_value_set_bytes": count + 1, "key_value_set": count + 1}
    assert gathering.gathered("/root/1", None) == data
    assert store.counted["key_value_dir_get"] == 1 and store.counted["blocking_key_value_get_bytes"] == count
    assert store.counted["key_value_delete"] == 2
    assert gathering.gathered("/root/1", None) == [] and gathering.gathered("/root/2", [0, 1]) == [b"another"]
    assert store.held == {}


def test_what_was_sent_last_counts_and_others_are_left_alone(store):
    gathering.send("item", 0, b"a" * 10_000_000)
    gathering.send("item", 0, b"b")
    gathering.send("item", 1, b"of another directory with this name")
    assert gathering.gathered("item", {0}) == [b"b"]
    assert gathering.gathered("item", {1, 5}) == [b"of another directory with this name"]


def test_damage_is_an_error(store, monkeypatch):
    gathering.send("item", 0, bytes(100))
    (key,) = [key for key in store.held if key.endswith("/0/0")]
    store.held[key] += b"x"
    with pytest.raises(ValueError, match="other bytes"):
        gathering.gathered("item", None)
    monkeypatch.setattr(gathering, "_MOST_BYTES", 50)
    gathering.send("item", 0, bytes(100))
    with pytest.raises(ValueError, match="no end after 50 bytes"):
        gathering.gathered("item", None)
