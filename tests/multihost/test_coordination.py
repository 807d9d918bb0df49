"""Bytes in a key-value store come back as they were written, or not at all; gathered once, and removed."""

import collections
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbax_t5x.multihost import coordination
from orbax_t5x.multihost.coordination import read_pieces, waited_for_key, write_pieces
from tests.support.key_values import KeyValues


class Store(dict):
    """The calls of JAX's client, over a dict; what is missing is late."""

    def key_value_set_bytes(self, key, value, allow_overwrite=False):
        assert allow_overwrite and len(value) <= 4 << 20
        self[key] = value

    def blocking_key_value_get_bytes(self, key, timeout_ms):
        if key not in self:
            raise RuntimeError(f"DEADLINE_EXCEEDED: {key} after {timeout_ms}")
        return self[key]

    blocking_key_value_get = blocking_key_value_get_bytes


MOST = 6 << 20


@given(st.binary(min_size=1, max_size=40), st.integers(1, 9))
def test_bytes_come_back_whatever_the_size_of_a_piece(data, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coordination, "_PIECE_BYTES", size)
        store = Store()
        head = write_pieces(store, "key", data)
        assert len(store) == head["pieces"] == -(-sum(map(len, store.values())) // size)
        assert read_pieces(store, "key", head, len(data)) == data
        with pytest.raises(ValueError, match=f"no end after {len(data)} bytes"):
            read_pieces(store, "key", head, len(data) - 1)
        for key, piece in store.items():
            with pytest.raises(ValueError, match="other bytes"):
                read_pieces(Store({**store, key: piece + b"x"}), "key", head, MOST)
            rest = Store({other: store[other] for other in store if other != key})
            assert read_pieces(rest, "key", head, MOST) is None


def test_a_piece_is_below_the_limit_of_a_message():
    store = Store()
    data = random.Random(0).randbytes(5 << 20)
    assert read_pieces(store, "key", write_pieces(store, "key", data), MOST) == data
    assert len(store) > 1


def test_a_key_is_late_or_its_process_is_dead():
    assert waited_for_key(Store(key=b""), "key", 0.1) and not waited_for_key(Store(), "key", 0.1)

    class Dead(Store):
        def blocking_key_value_get(self, key, timeout_ms):
            raise RuntimeError("UNAVAILABLE: a task died")

    with pytest.raises(RuntimeError, match="died"):
        waited_for_key(Dead(), "key", 0.1)


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
    monkeypatch.setattr(coordination, "key_value_store", lambda: made)
    return made


@pytest.mark.parametrize("count", [1, 2, 4, 64])
def test_messages_grow_with_the_processes_and_not_with_their_square(store, count):
    data = [bytes([process]) * 1000 for process in range(count)]
    for process in reversed(range(count)):
        coordination.send("/root/1", process, data[process])
    coordination.send("/root/2", 0, b"another")
    assert store.counted == {"key_value_set_bytes": count + 1, "key_value_set": count + 1}
    assert coordination.gathered("/root/1", None) == data
    assert store.counted["key_value_dir_get"] == 1 and store.counted["blocking_key_value_get_bytes"] == count
    assert store.counted["key_value_delete"] == 2
    assert coordination.gathered("/root/1", None) == [] and coordination.gathered("/root/2", [0, 1]) == [b"another"]
    assert store.held == {}


def test_what_was_sent_last_counts_and_others_are_left_alone(store):
    coordination.send("item", 0, b"a" * 10_000_000)
    coordination.send("item", 0, b"b")
    coordination.send("item", 1, b"of another directory with this name")
    assert coordination.gathered("item", {0}) == [b"b"]
    assert coordination.gathered("item", {1, 5}) == [b"of another directory with this name"]


def test_damage_is_an_error(store, monkeypatch):
    coordination.send("item", 0, bytes(100))
    (key,) = [key for key in store.held if key.endswith("/0/0")]
    store.held[key] += b"x"
    with pytest.raises(ValueError, match="other bytes"):
        coordination.gathered("item", None)
    monkeypatch.setattr(coordination, "_MOST_GATHERED_BYTES", 50)
    coordination.send("item", 0, bytes(100))
    with pytest.raises(ValueError, match="no end after 51 bytes"):
        coordination.gathered("item", None)
