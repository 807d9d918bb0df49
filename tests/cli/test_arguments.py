"""Arguments that several commands read."""

import os

import pytest

from orbax_t5x.cli import arguments
from orbax_t5x.cli.arguments import size_argument
from orbax_t5x.cli.main import main
from orbax_t5x.text.output import UsageError


@pytest.mark.parametrize(
    ("text", "count"), [("7", 7), ("256M", 256 << 20), ("256MiB", 256 << 20), ("1.5G", 3 << 29), ("64 kb", 64 << 10)]
)
def test_sizes(text, count):
    assert size_argument(text) == count


@pytest.mark.parametrize("text", ["", "0", "M", "-1", "1X", "0.1"])
def test_sizes_that_are_none(text, capsys):
    assert main(["convert", "source", "destination", f"--memory-limit={text}"]) == 2
    assert f"argument --memory-limit: {text!r} is no size; write bytes" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "two"])
def test_counts_that_are_none(text, capsys):
    assert main(["compare-logits", "a", "b", f"--length={text}"]) == 2
    assert f"{text!r} is no number from 1 on" in capsys.readouterr().err


def test_a_file_of_rules_is_a_file_of_a_bounded_size(tmp_path, monkeypatch):
    monkeypatch.setattr(arguments, "_MOST_JSON_BYTES", 8)
    (tmp_path / "rules.json").write_text("[      ]")
    assert arguments.read_map(str(tmp_path / "rules.json")) == []
    (tmp_path / "rules.json").write_text("[       ]")
    with pytest.raises(UsageError, match="more than 8 bytes"):
        arguments.read_map(str(tmp_path / "rules.json"))
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo"):
        with pytest.raises(UsageError, match=r"a FIFO, a device or a directory|Is a directory"):
            arguments.read_map(str(path))
