"""Bytes in a key-value store come back as they were written, or not at all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbax_t5x.multihost import coordination
from orbax_t5x.multihost.coordination import read_pieces, waited_for_key, write_pieces


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


@given(st.binary(max_size=40), st.integers(1, 9))
def test_bytes_come_back_whatever_the_size_of_a_piece(data, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coordination, "_PIECE_BYTES", size)
        store = Store()
        head = write_pieces(store, "key", data)
        assert len(store) == head["pieces"] == -(-len(data) // size)
        assert read_pieces(store, "key", head) == data
        for key, piece in store.items():
            with pytest.raises(ValueError, match="other bytes"):
                read_pieces(Store({**store, key: piece + b"x"}), "key", head)
            assert read_pieces(Store({other: store[other] for other in store if other != key}), "key", head) is None


def test_a_piece_is_below_the_limit_of_a_message():
    store = Store()
    assert read_pieces(store, "key", write_pieces(store, "key", bytes(5 << 20))) == bytes(5 << 20)
    assert len(store) > 1


def test_a_key_is_late_or_its_process_is_dead():
    assert waited_for_key(Store(key=b""), "key", 0.1) and not waited_for_key(Store(), "key", 0.1)

    class Dead(Store):
        def blocking_key_value_get(self, key, timeout_ms):
            raise RuntimeError("UNAVAILABLE: a task died")

    with pytest.raises(RuntimeError, match="died"):
        waited_for_key(Dead(), "key", 0.1)
