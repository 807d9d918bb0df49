"""JSON of many small objects costs no more than its estimate, and is refused before it is parsed."""

import pytest

from orbax_t5x.errors import LimitExceededError
from orbax_t5x.files.strict_json import parse_object, parsed_bytes
from tests.support.hostile_files import repeated
from tests.support.traced_memory import peak_of

_MIB = 1 << 20


@pytest.mark.slow
@pytest.mark.parametrize("item", [b"{}", b"[]", b"[0]", b'{"a":0}', b"[{}]", b'{"a":{}}'])
def test_json_of_many_small_parts_is_refused_before_it_is_parsed(item):
    data = repeated(item, 12 * _MIB)

    def parse():
        with pytest.raises(LimitExceededError, match="bytes of JSON would take") as caught:
            parse_object(data, "/the/file")
        assert caught.value.path == "/the/file"

    assert peak_of(parse) < _MIB


@pytest.mark.slow
@pytest.mark.parametrize(
    "item", [b"{}", b"[]", b"[0]", b'{"a":0}', b'{"a":{}}', b"1", b"999", b"1.5", b'""', b'"ab"', b'"\\u20ac"']
)
def test_the_estimate_of_what_parsing_takes_is_one(item):
    data = repeated(item, 400_000)
    estimate = parsed_bytes(data)
    peak = peak_of(lambda: parse_object(data, "/the/file"))
    assert peak <= max(estimate, 15 * len(data))
