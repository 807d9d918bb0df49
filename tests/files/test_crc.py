"""Checksums of a whole from the checksums of its ranges, of both kinds."""

import functools
import itertools
import zlib

import google_crc32c
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from orbax_t5x.files.crc import CRC32, CRC32C

# Each with the library that computes it.
KINDS = {"crc32c": (CRC32C, google_crc32c.value), "crc32": (CRC32, zlib.crc32)}


@pytest.mark.parametrize("kind", KINDS)
class TestChecksums:
    @given(st.lists(st.binary(max_size=40), max_size=60))
    @example([bytes([number]) * number for number in range(100)])
    def test_combined_is_that_of_the_concatenation(self, kind: str, parts: list[bytes]) -> None:
        ours, value = KINDS[kind]
        crcs = [value(part) for part in parts]
        whole = value(b"".join(parts))
        assert ours.combine(crcs, [len(part) for part in parts]) == whole
        assert functools.reduce(ours.extend, parts, 0) == whole

    @given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**40)), min_size=1, max_size=80))
    def test_the_vectorised_way_equals_the_plain_one(self, kind: str, parts: list[tuple[int, int]]) -> None:
        ours, _ = KINDS[kind]
        crcs, lengths = zip(*parts, strict=True)
        plain = functools.reduce(lambda whole, part: ours.combine([whole, part[0]], [0, part[1]]), parts, 0)
        padded = ([0] * 40 + list(crcs), [0] * 40 + list(lengths))
        assert ours.combine(*padded) == ours.combine(*map(np.asarray, padded)) == plain

    def test_any_length_and_alignment(self, kind: str) -> None:
        ours, value = KINDS[kind]
        data = np.random.default_rng(0).integers(0, 256, 70_000, np.uint8)
        for start, length in itertools.product((0, 1, 7, 63), (0, 1, 15, 64, 255, 256, 257, 1024, 4095, 65_537)):
            part = data[start : start + length]
            assert ours.extend(0, part) == ours.extend(0, memoryview(part)) == value(part.tobytes())
            assert ours.extend(value(b"before"), part) == value(b"before" + part.tobytes())
        numbers = data.view(np.float32).reshape(7, -1)
        assert ours.extend(0, numbers) == value(numbers.tobytes())

    def test_gigabytes_of_zeros(self, kind: str) -> None:
        ours, value = KINDS[kind]
        zeros = bytes(1 << 20)
        whole = functools.reduce(lambda crc, _: ours.extend(crc, zeros), range(100), 0)
        assert ours.combine([value(zeros)] * 100, [1 << 20] * 100) == whole

    def test_different_counts_are_refused(self, kind: str) -> None:
        with pytest.raises(ValueError, match="2 checksums for 1 lengths"):
            KINDS[kind][0].combine([1, 2], [3])
