"""Counters of one execution, filled from many threads."""

from concurrent.futures import ThreadPoolExecutor

from orbax_t5x.lazy.read_stats import ChecksummedRange, ReadStats


def test_counts_from_many_threads_add_up():
    stats = ReadStats()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: stats.count(number, gap_bytes=1, fill_chunks=2), range(1000)))
    assert (stats.bytes_read, stats.gap_bytes, stats.fill_chunks) == (sum(range(1000)), 1000, 2000)


def test_ranges_are_those_of_each_leaf_in_the_order_they_came():
    stats = ReadStats()
    first, second = object(), object()
    stats.add_range(first, ChecksummedRange(4, 8, 1))
    stats.add_range(second, ChecksummedRange(0, 2, 3))
    stats.add_range(first, ChecksummedRange(0, 4, 2))
    assert stats.ranges(first) == [ChecksummedRange(4, 8, 1), ChecksummedRange(0, 4, 2)]
    stats.ranges(second).clear()
    assert len(stats.ranges(second)) == 1, "a caller changed what is recorded"
    assert stats.ranges(object()) == []
