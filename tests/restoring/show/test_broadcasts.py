"""Decisions as sentences and as data."""

import json

from orbax_t5x.restoring.broadcast.chunks import ReadCounts, ReadDecision
from orbax_t5x.restoring.broadcast.needs import StoreKind
from orbax_t5x.restoring.show.broadcasts import broadcast_text, broadcast_totals, decision_data, decision_text

SENT = ReadDecision(StoreKind.BUCKET, ReadCounts(64, 64 << 20), ReadCounts(1, 1 << 20), 63 << 20)
OWN = ReadDecision(StoreKind.LOCAL, ReadCounts(2, 2 << 20), ReadCounts(1, 1 << 20), 1 << 20)
ALONE = ReadDecision(StoreKind.BUCKET, ReadCounts(4, 1 << 20), None)


def test_a_decision_is_a_sentence_with_the_numbers_of_both_ways():
    assert decision_text(SENT) == (
        "read once and sent: 1 request and 1.00 MiB, 63.0 MiB sent (bucket store); by each for itself "
        "64 requests and 64.0 MiB"
    )
    assert decision_text(OWN) == (
        "read by each process for itself: 2 requests and 2.00 MiB of all together (local store); once and sent "
        "1 request and 1.00 MiB, 1.00 MiB sent"
    )
    assert decision_text(ALONE).endswith("4 requests and 1.00 MiB of all together (bucket store); nothing can be sent")


def test_decisions_together():
    assert broadcast_text({}) == "" and broadcast_totals({}) is None
    assert broadcast_text({"a": OWN}) == ("All processes together take 2 requests and 2.00 MiB; each reads for itself.")
    # Two leaves with stored bytes in common have one decision, which is counted once.
    assert broadcast_text({"a": SENT, "b": SENT, "c": ALONE}) == (
        "All processes together take 5 requests and 2.00 MiB: 2 leaves (bucket store) are read once and sent, in "
        "1 request and 1.00 MiB instead of 64 requests and 64.0 MiB."
    )
    assert broadcast_totals({"a": SENT, "b": SENT, "c": ALONE}) == {"leaves_sent": 2, "requests": 5, "bytes": 2 << 20}


def test_a_decision_is_data():
    assert decision_data(None) is None
    assert json.loads(json.dumps(decision_data(SENT))) == {
        "is_broadcast": True,
        "store": "bucket",
        "own": {"requests": 64, "bytes": 64 << 20},
        "once": {"requests": 1, "bytes": 1 << 20, "bytes_sent": 63 << 20},
    }
    assert decision_data(ALONE)["once"] is None
