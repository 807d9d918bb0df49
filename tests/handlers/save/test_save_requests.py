"""A save makes two requests more than Orbax's own; each process sends its checksums once."""

import pytest

from benchmarks import save_requests
from benchmarks.save_requests import SAVES


@pytest.mark.slow
def test_saves_of_two_processes_take_two_requests_more_than_plain_ones():
    counts = save_requests.count_bucket(2, 3)
    for version in ("v0", "v1"):
        beyond = {("PUT", "STEP/state/_CHECKSUMS.json"): 1}
        assert counts.beyond_plain(version) == (beyond, {})
        # The root is listed by the first save of a process, to find what older steps record.
        first, _ = counts.beyond_plain(version, step=1)
        assert {kind for kind, _ in first} <= {"LIST", "HEAD", "PUT"} and len(first) <= 3
        primary, other = ([name for name, _, _ in one] for one in counts.messages[f"{version} ours", SAVES])
        assert other == ["key_value_set_bytes"]
        assert primary == [*other, *["key_value_try_get_bytes", "key_value_delete"] * 2]
        assert counts.messages[f"{version} plain", SAVES] == [[], []]


def test_system_calls_are_told_apart():
    lines = [
        '7 openat(AT_FDCWD</>, "/r/v0 ours/3.orbax-checkpoint-tmp/state.orbax-checkpoint-tmp/x", O_WRONLY|O_CREAT)',
        '7 openat(AT_FDCWD</>, "/r/v0 ours/2", O_RDONLY|O_DIRECTORY <unfinished ...>',
        "8 fsync(5</r/v0 ours/3/state>) = 0",
        '8 newfstatat(AT_FDCWD</>, "/r/v0 ours", {}, 0) = 0',
        '8 rename("/r/a/b", "/r/a/c") = 0',
        '8 openat(AT_FDCWD</>, "/elsewhere", O_RDONLY) = 5',
    ]
    counts = save_requests._counts([("stat", "mark/v0 ours/3", 0), *save_requests._system_calls(lines, "/r/")], [])
    assert [f"{one.kind} {one.path}" for one in counts.saves["v0 ours", 3]] == [
        "create STEP/state/x",
        "list STEP",
        "sync STEP/state",
        "stat ROOT",
        "rename a/b",
    ]
