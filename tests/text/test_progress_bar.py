"""What restores, saves and conversions say while they run: a bar on a terminal, two lines in the log."""

import io
import logging
import sys
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.text import progress_bar
from orbax_t5x.text.progress_bar import ProgressBar, bar_line

BUNDLE = Path(__file__).parents[1] / "goldens" / "tf_bundle" / "t5_1_1_f32"
# Other tests write no lines, however slow the machine is; see conftest.py.
INTERVALS = {name: getattr(progress_bar, name) for name in ("_LEAST_LINE_INTERVAL_SECS", "_MOST_LINE_INTERVAL_SECS")}


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("FORCE_COLOR", raising=False)


# -- the bar


def test_a_bar_is_for_terminals(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        with ProgressBar("converting", stream) as bar:
            bar(0, 1 << 30, "a")
            bar(1 << 29, 1 << 30, "b")
            bar(1 << 30, 1 << 30, "c")
    assert pipe.getvalue() == ""
    drawn = terminal.getvalue()
    assert "100%  1.00 GiB of 1.00 GiB" in drawn
    assert drawn.endswith("\r\x1b[2K") and "\n" not in drawn


def test_a_terminal_that_cannot_move_its_cursor_gets_nothing(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    dumb = Terminal()
    with ProgressBar("converting", dumb) as bar:
        bar(1, 1, "a")
    assert dumb.getvalue() == ""


@pytest.mark.parametrize(("seconds", "lines"), [(0.9, 0), (11.0, 10), (40.0, 10), (400.0, 40)])
def test_a_pipe_gets_a_line_for_each_tenth_or_every_ten_seconds(monkeypatch, seconds, lines):
    now = 0.0
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: now)
    for name, interval in INTERVALS.items():
        monkeypatch.setattr(progress_bar, name, interval)
    pipe, steps = io.StringIO(), 4000
    with ProgressBar("converting", pipe) as bar:
        for step in range(steps + 1):
            now = seconds * step / steps
            bar(step << 20, steps << 20, "\x1b[2J")
    written = pipe.getvalue().splitlines()
    assert abs(len(written) - lines) <= 1 and "\x1b" not in pipe.getvalue() and "\r" not in pipe.getvalue()
    assert all(line.startswith("converting ") and "of 3.91 GiB" in line for line in written)


def test_a_bar_of_nothing_is_full():
    terminal = Terminal()
    with ProgressBar("converting", terminal) as bar:
        bar(0, 0, "a")
    assert "100%" in terminal.getvalue()


def test_a_bar_that_was_never_called_draws_nothing():
    terminal = Terminal()
    with ProgressBar("converting", terminal):
        pass
    assert terminal.getvalue() == ""


def test_names_of_leaves_are_not_drawn():
    """What a name holds must not move a cursor or make the line wrap."""
    terminal = Terminal()
    with ProgressBar("converting", terminal) as bar:
        bar(1, 1, "層" * 100 + "\x1b[2J")
    assert "\x1b[2J" not in terminal.getvalue() and "層" not in terminal.getvalue()


@pytest.mark.parametrize("columns", [1, 10, 20, 40, 80, 300])
@pytest.mark.parametrize(("done", "total"), [(0, 0), (0, 1), (1, 3), (2**50 - 1, 2**50), (5, 4)])
def test_the_line_never_fills_the_terminal(columns, done, total):
    line = bar_line("restoring", done, total, "1.00 GiB", columns)
    assert len(line) < columns and line.startswith("restoring"[: columns - 1])


def test_a_narrow_terminal_loses_the_rate_then_the_bar_then_the_amount():
    assert [bar_line("saving", 1 << 29, 1 << 30, "1.00 GiB", columns) for columns in (80, 50, 35, 20)] == [
        "saving ############............  50%   512 MiB of 1.00 GiB  1.00 GiB/s",
        "saving #######........  50%   512 MiB of 1.00 GiB",
        "saving  50%   512 MiB of 1.00 GiB",
        "saving ###....  50%",
    ]


@pytest.mark.slow
def test_bar_is_a_keyword_of_every_way_to_restore_and_save(monkeypatch, tmp_path):
    with ot.open_checkpoint(BUNDLE) as source, ocp.Checkpointer(ot.TrainStateHandler()) as checkpointer:
        plan = ot.plan_restore(source, None)
        ways = {
            "converting": lambda: ot.convert(source, tmp_path / "converted", progress="bar"),
            "restoring": lambda: ot.restore(source, None, progress="bar"),
            "restoring ": lambda: plan.execute(progress="bar"),
            "saving": lambda: checkpointer.save(
                tmp_path / "saved", args=ot.args.TrainStateSave(dict(source.leaves), progress="bar")
            ),
            "restoring  ": lambda: checkpointer.restore(
                tmp_path / "converted", args=ot.args.TrainStateRestore(None, progress="bar")
            ),
        }
        for verb, run in ways.items():
            terminal = Terminal()
            monkeypatch.setattr(sys, "stderr", terminal)
            run()
            assert verb.strip() in terminal.getvalue() and "100%" in terminal.getvalue(), verb


@pytest.mark.parametrize("progress", ["bars", ""])
def test_no_other_text_is_taken_for_progress(tmp_path, progress):
    with pytest.raises(ValueError, match="'bar'"):
        ot.restore(BUNDLE, None, progress=progress)
    with ocp.Checkpointer(ot.TrainStateHandler()) as checkpointer, pytest.raises(ValueError, match="'bar'"):
        checkpointer.save(tmp_path / "x", args=ot.args.TrainStateSave({"a": np.ones(2)}, progress=progress))


def test_an_interrupt_takes_the_bar_away():
    terminal = Terminal()
    with pytest.raises(KeyboardInterrupt), ProgressBar("restoring", terminal) as bar:
        bar(1, 2, "a")
        raise KeyboardInterrupt
    drawn = terminal.getvalue()
    assert "50%" in drawn and drawn.endswith("\r\x1b[2K")


# -- the log


def lines_of(caplog, run):
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="orbax_t5x"):
        run()
    return [record.getMessage() for record in caplog.records if record.name.startswith("orbax_t5x")]


def test_a_restore_logs_two_lines(caplog):
    with ot.open_checkpoint(BUNDLE) as source:
        path, count = source.path, len(source.leaves)
    before, after = lines_of(caplog, lambda: ot.restore(BUNDLE, None))
    assert before == f"restoring {count} leaves ({count} read) from {path} (tf_bundle): 73.9 KiB to read here"
    assert after.startswith(f"restored {count} leaves from {path} (tf_bundle): 73.9 KiB read in ")
    assert after.endswith(f"{count} leaves verified")


def test_the_lines_count_what_becomes_of_leaves(caplog):
    target = {"shared": {"embedding": np.zeros((128, 16), np.float32)}, "new": np.zeros(3), "same": ...}

    def run():
        ot.restore(BUNDLE, target, fallback={"new": np.ones(3)}, fallback_for=["new"], strict=False)

    before, after = lines_of(caplog, run)
    assert before.startswith("restoring 3 leaves (1 read, 1 from the fallback, 1 kept, 142 of the checkpoint unused)")
    assert "8.00 KiB to read here" in before and "1 leaf verified" in after


@pytest.mark.slow
def test_a_handler_logs_the_same_two_lines(caplog, tmp_path):
    ot.convert(BUNDLE, tmp_path / "item")
    with ocp.Checkpointer(ot.TrainStateHandler()) as checkpointer:
        lines = lines_of(caplog, lambda: checkpointer.restore(tmp_path / "item", args=ot.args.TrainStateRestore(None)))
    assert len(lines) == 2 and str(tmp_path / "item") in lines[0] and "(orbax)" in lines[1]


def test_a_path_cannot_move_the_cursor_in_a_log(caplog, tmp_path):
    path = tmp_path / "a\x1b[2J.safetensors"
    safetensors.numpy.save_file({"a": np.ones(2, np.float32)}, path)
    before, after = lines_of(caplog, lambda: ot.restore(path, None))
    assert "\x1b" not in before + after and "a\\x1b[2J.safetensors" in before


def test_below_info_nothing_is_counted(caplog, monkeypatch):
    monkeypatch.setattr("orbax_t5x.restoring.plan._about_to_restore", None)
    with caplog.at_level(logging.WARNING, logger="orbax_t5x"):
        ot.restore(BUNDLE, None)
    assert not caplog.records
