"""Checksums of ranges that cover a whole, in any order, twice, or in columns."""

import itertools

import google_crc32c
from hypothesis import given
from hypothesis import strategies as st

from orbax_t5x.lazy.read_stats import ChecksummedRange
from orbax_t5x.readers.ranges.coverage import cover, uncovered
from tests.support.byte_ranges import DATA, part


class TestCoverage:
    @given(
        st.lists(st.sets(st.integers(1, 119), max_size=8), min_size=1, max_size=3),
        st.randoms(use_true_random=False),
        st.integers(0, 40),
    )
    def test_any_partitions_together_cover(self, cuts: list[set[int]], random, repeats: int) -> None:
        parts = [part(*ends) for edges in cuts for ends in itertools.pairwise(sorted({0, 120, *edges}))]
        parts += random.choices(parts, k=repeats)
        random.shuffle(parts)
        assert cover(parts, 120) == (google_crc32c.value(DATA), True, None)
        assert uncovered(parts, 120) == []

    @given(st.sets(st.integers(1, 119), min_size=2, max_size=8), st.data())
    def test_a_missing_part_leaves_it_open(self, edges: set[int], data) -> None:
        parts = [part(*ends) for ends in itertools.pairwise(sorted({0, 120, *edges}))]
        gone = parts.pop(data.draw(st.integers(0, len(parts) - 1)))
        assert cover(parts, 120) == (None, False, None)
        assert uncovered(parts, 120) == [(gone.start, gone.stop)]

    def test_what_lies_on_no_chain_is_not_verified(self) -> None:
        assert cover([part(0, 120), part(30, 60)], 120) == (google_crc32c.value(DATA), False, None)
        assert cover([part(0, 70), part(50, 120)], 120) == (None, False, None)

    def test_two_readings_that_differ(self) -> None:
        bad = ChecksummedRange(30, 60, part(30, 60).crc ^ 1)
        assert cover([part(0, 30), part(30, 60), bad, part(60, 120)], 120).conflict == (30, 60)
        finer = [part(0, 30), bad, part(60, 120), part(0, 60)]
        assert cover(finer, 120).conflict is not None

    def test_nothing_is_covered_by_nothing(self) -> None:
        assert cover([], 0) == (0, True, None)
        assert cover([], 1) == (None, False, None)
