"""Chunks of broadcasts: a fast way to cut them gives what the general one does."""

import numpy as np
from hypothesis import settings

from benchmarks.scale_model import FORMATS, Job, Stored, _needs_of
from orbax_t5x.restoring.broadcast import chunks
from orbax_t5x.restoring.broadcast.schedule import schedule_broadcast


def test_rows_cut_all_at_once_are_those_of_the_general_way(monkeypatch):
    random = np.random.default_rng(0)
    cases = []
    for _ in range(max(20, settings.default.max_examples // 5)):
        shape = tuple(random.choice([1, 3, 64, 500, 512], random.integers(1, 4)).tolist())
        stored = Stored.of(FORMATS[str(random.choice(["safetensors", "orbax"]))], {"a": shape})
        processes = int(random.choice([2, 8, 16]))
        layout = str(random.choice(["rows", "columns", "replicated"]))
        needs = [_needs_of(stored, "a", Job(processes, 1, layout, True))]
        cases.append((needs, processes, int(random.choice([1 << 16, 1 << 18, 1 << 20]))))
    at_once = [schedule_broadcast(*case) for case in cases]
    monkeypatch.setattr(chunks, "_cut_rows", lambda pieces, chunk_bytes: ([], pieces))
    assert [schedule_broadcast(*case) for case in cases] == at_once
    assert max(len(one.chunks) for one in at_once) > 8
