"""Arguments that several commands read."""

import pytest

from orbax_t5x.cli.arguments import size_argument
from orbax_t5x.cli.main import main


@pytest.mark.parametrize(
    ("text", "count"), [("7", 7), ("256M", 256 << 20), ("256MiB", 256 << 20), ("1.5G", 3 << 29), ("64 kb", 64 << 10)]
)
def test_sizes(text, count):
    assert size_argument(text) == count


@pytest.mark.parametrize("text", ["", "0", "M", "-1", "1X", "0.1"])
def test_sizes_that_are_none(text, capsys):
    assert main(["convert", "source", "destination", f"--memory-limit={text}"]) == 2
    assert f"argument --memory-limit: {text!r} is no size; write bytes" in capsys.readouterr().err
