"""Ranges of bytes, and requests that are given up together."""

from orbax_t5x.files.ranges import NO_BYTES, BoundedRange, RequestGroup


class Request:
    cancelled = 0

    def cancel(self):
        self.cancelled += 1


def test_ranges():
    assert NO_BYTES.is_empty and NO_BYTES.size == 0
    assert [BoundedRange.between(3, 7), BoundedRange.last(4)] == [(3, 7, 4, None), (-4, None, 4, None)]
    assert [BoundedRange.whole(9), BoundedRange.rest(2, 9)] == [(0, None, 9, None), (2, None, 9, None)]
    ranges = [BoundedRange.between(3, 7), BoundedRange.last(4), BoundedRange.whole(9), BoundedRange.rest(2, 9)]
    # Where the end is not known, one byte more than there may be shows that there is more.
    assert [wanted.size for wanted in ranges] == [4, 4, 10, 10]
    assert not any(wanted.is_empty for wanted in ranges)


def test_requests_of_a_group():
    group, first, second, later = RequestGroup(), Request(), Request(), Request()
    with group.holding(first):
        pass
    with group.holding(second):
        group.cancel()
    with group.holding(later):
        pass
    assert [first.cancelled, second.cancelled, later.cancelled] == [0, 1, 1]
