"""Kept steps: those of T5X's manager, as recorded, by metrics of a TensorBoard file."""

from __future__ import annotations

import json
import shutil
import types
from pathlib import Path

import pytest

from orbax_t5x.integrations.t5x_retention import Retention, metrics

JOB = Path(__file__).parents[1] / "goldens" / "t5x_job"
RETENTION = json.loads((JOB / "retention.json").read_text())


@pytest.mark.parametrize("name", sorted(RETENTION["managers"]))
def test_retention_is_t5xs(name, tmp_path):
    """Our policy over the recorded steps; the newest step is never removed, which T5X does in one case."""
    recorded = RETENTION["managers"][name]
    options = recorded["options"]
    policy = Retention(
        str(tmp_path),
        keep=options["keep"],
        force_keep_period=options.get("force_keep_period"),
        metric=options.get("metric_name_to_monitor"),
        mode=options.get("metric_mode", "max"),
        keeps_unmeasured=options.get("keep_checkpoints_without_metrics", True),
    )
    events = (JOB / RETENTION["events_file"]).read_bytes()
    (tmp_path / "train").mkdir()
    kept, previous = [], None
    for step, expected in zip((0, 2, 4, 6, 8, 10), recorded["after_each_save"], strict=True):
        if previous is not None:
            size = RETENTION["events_bytes_after_step"][str(previous)]
            (tmp_path / "train" / RETENTION["events_file"]).write_bytes(events[:size])
        checkpoints = [types.SimpleNamespace(step=one) for one in (*kept, step)]
        flags = policy.should_preserve(checkpoints, context=None)
        kept = [one.step for one, flag in zip(checkpoints, flags, strict=True) if flag]
        if policy.keeps_unmeasured:
            assert kept == expected
        else:
            assert kept == sorted({*kept, step}), "the newest stays"
        previous = step
    if policy.keeps_unmeasured:
        assert kept == recorded["on_disk"]


def test_metrics_of_a_run(tmp_path):
    folder = tmp_path / "train"
    folder.mkdir()
    shutil.copy(JOB / RETENTION["events_file"], folder)
    measured = {int(step): loss for step, loss in RETENTION["loss_by_step"].items()}
    expected = {step: loss for step, loss in measured.items() if step not in RETENTION["no_metrics_at"]}
    assert metrics(str(tmp_path), "train/loss") == expected
    assert metrics(str(tmp_path), "train/nothing") == metrics(str(tmp_path), "other/loss") == {}
