"""The stack and the memo of a pickle: what is shared stays shared, and how much may be made is bounded."""

import pickle

import pytest

from orbax_t5x.errors import LimitExceededError
from orbax_t5x.extras.torch_zip.opcodes import parse_pickle
from orbax_t5x.files.limits import Limits
from tests.support.torch_files import pickled


def parsed(data, **limits):
    return parse_pickle(data, "file", len(data), Limits(**limits))


def test_what_is_shared_stays_shared():
    one = ["once"]
    found = parsed(pickle.dumps({"a": one, "b": one}, 2))
    assert found["a"] is found["b"]
    one.append(one)
    found = parsed(pickle.dumps(one, 2))
    assert found[1] is found


@pytest.mark.parametrize(
    "data", [b"(" * 900_000, b"]" * 900_000, b"N" + b"q\0" * 900_000, b")" + b"\x85" * 900_000, b"N0" * 900_000]
)
def test_bombs_cost_what_the_file_may(data):
    with pytest.raises(LimitExceededError, match=r"more than \d+ (objects|operations)"):
        parsed(b"\x80\x02" + data)


def test_limits():
    data = pickled({str(number): (number,) for number in range(100)})
    parsed(data)
    with pytest.raises(LimitExceededError, match=r"more than 20 (objects|operations) [\s\S]*Limits\.entries = 10"):
        parsed(data, entries=10)
