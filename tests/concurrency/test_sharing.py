"""Shares of work are complete, balanced, and the same wherever they are dealt."""

from hypothesis import given
from hypothesis import strategies as st

from orbax_t5x.concurrency import balanced_shares


@given(st.lists(st.integers(0, 1 << 40), max_size=60), st.integers(1, 9))
def test_each_item_goes_to_one_share_and_no_share_is_larger_by_more_than_an_item(sizes, count):
    items = list(enumerate(sizes))
    shares = balanced_shares(items, lambda item: item[1], count)
    assert len(shares) == count
    assert sorted(item for share in shares for item in share) == items
    held = [sum(size for _, size in share) for share in shares]
    assert max(held) - min(held) <= max(sizes, default=0)
    assert balanced_shares(iter(items), lambda item: item[1], count) == shares
