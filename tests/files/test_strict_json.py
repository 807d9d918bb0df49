"""JSON of a checkpoint: what is refused, and before it takes memory."""

import pytest

from orbax_t5x.errors import CheckpointError, CorruptCheckpointError, LimitExceededError
from orbax_t5x.files.strict_json import parse_object
from tests.support.traced_memory import peak_of

_MIB = 1 << 20


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "not JSON"),
        (b"[]", "list, not an object"),
        (b'{"a": \xff}', "not UTF-8"),
        (b'{"a": 1, "b": 2, "a": 1}', "'a' occurs twice"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deep"),
        (b'{"a": 1} x', "not JSON"),
    ],
)
def test_what_is_no_object_is_corrupt(data, match):
    with pytest.raises(CorruptCheckpointError, match=match) as caught:
        parse_object(data, "/the/file")
    assert caught.value.path == "/the/file"


def test_infinities_are_taken_where_they_are_allowed():
    assert parse_object(b'{"a": [Infinity, 1]}', "", allow_nan=True)["a"] == [float("inf"), 1]


@pytest.mark.parametrize("item", [b"{}", b"[]", b"[0]", b'{"a":0}', b"[{}]"])
def test_many_small_containers_are_refused_before_they_are_parsed(item):
    data = b'{"a":[' + b",".join([item] * (12 * _MIB // (len(item) + 1))) + b"]}"

    def refused():
        with pytest.raises(LimitExceededError, match="far more memory"):
            parse_object(data, "/the/file")

    assert peak_of(refused) < _MIB


def test_lists_of_a_hundred_thousand_small_leaves_are_taken():
    leaves = b",".join(b'"%07d":{"dtype":"F32","shape":[],"data_offsets":[0,4]}' % number for number in range(100_000))
    assert len(parse_object(b"{" + leaves + b"}", "")) == 100_000
    with pytest.raises(CheckpointError, match="'0000007' occurs twice"):
        parse_object(b"{" + leaves + b',"0000007":0}', "")
