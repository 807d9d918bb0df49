"""crc32c of a whole from the checksums of its ranges."""

import functools

import google_crc32c
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from orbax_t5x.storage import crc32c as _crc


class TestChecksums:
    @given(st.lists(st.binary(max_size=40), max_size=60))
    @example([bytes([number]) * number for number in range(100)])
    def test_combined_is_that_of_the_concatenation(self, parts: list[bytes]) -> None:
        crcs = [google_crc32c.value(part) for part in parts]
        whole = google_crc32c.value(b"".join(parts))
        assert _crc.combine(crcs, [len(part) for part in parts]) == whole
        assert _crc.unmask(_crc.mask(whole)) == whole

    @given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**40)), min_size=1, max_size=80))
    def test_the_vectorised_way_equals_the_plain_one(self, parts: list[tuple[int, int]]) -> None:
        crcs, lengths = zip(*parts, strict=True)
        plain = functools.reduce(lambda whole, part: _crc.combine([whole, part[0]], [0, part[1]]), parts, 0)
        padded = ([0] * 40 + list(crcs), [0] * 40 + list(lengths))
        assert _crc.combine(*padded) == _crc.combine(*map(np.asarray, padded)) == plain

    def test_gigabytes_of_zeros(self) -> None:
        zeros = google_crc32c.value(bytes(1 << 20))
        whole = functools.reduce(lambda crc, _: google_crc32c.extend(crc, bytes(1 << 20)), range(100), 0)
        assert _crc.combine([zeros] * 100, [1 << 20] * 100) == whole

    def test_different_counts_are_refused(self) -> None:
        with pytest.raises(ValueError, match="2 checksums for 1 lengths"):
            _crc.combine([1, 2], [3])
