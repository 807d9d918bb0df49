"""Every command of the page on the command line, and of README.md, runs, in order, and prints what the page shows."""

import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.cli.main import main, make_parser
from tests.conftest import GOLDENS
from tests.support import page_outputs

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "command-line.md"
BUNDLE = ROOT / "orbax_t5x" / "cli" / "demo_data"


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """What the commands name: a bundle, a model of Hugging Face, two checkpoints and the rules between them."""
    for file in BUNDLE.glob("model.ckpt-1000000*"):
        shutil.copy(file, tmp_path)
    shutil.copytree(GOLDENS / "safetensors" / "t5_1_1", tmp_path / "hf")
    ot.convert(tmp_path / "hf", tmp_path / "hf_as_t5x", ot.rules.hf_t5_to_t5x())
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    safetensors.numpy.save_file({"a": np.ones(3, np.float32)}, tmp_path / "old" / "model.safetensors")
    safetensors.numpy.save_file({"b": np.ones(3, np.float32)}, tmp_path / "new" / "model.safetensors")
    for rules in ("rules.json", "r.json"):
        (tmp_path / rules).write_text('[["b", "a"]]')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("page", [PAGE, ROOT / "README.md"], ids=["docs", "readme"])
def test_commands_run(directory, capsys, monkeypatch, page):
    monkeypatch.setenv("COLUMNS", str(page_outputs.COLUMNS))
    outputs = []
    for block in page_outputs.blocks(page, "sh"):
        printed = ""
        for line in block.code.splitlines():
            if line.startswith("orbax-t5x "):
                printed += checked_output(line, capsys)
        outputs.append((block, page_outputs.cleaned(printed, {f"{directory}/": ""})))
    assert outputs
    page_outputs.compare(page, outputs)


def checked_output(line, capsys):
    program, *arguments = shlex.split(line, comments=True)
    code = main(arguments)
    said = capsys.readouterr()
    told = re.search(r"# exit code (\d): (.*)", line)
    assert program == "orbax-t5x" and code == (int(told[1]) if told else 0), (line, said.err)
    assert told is None or told[2] in " ".join((said.out + said.err).split()), line
    return said.out + said.err


def test_the_page_has_every_command_and_its_options():
    page = PAGE.read_text()
    commands = make_parser()._subparsers._group_actions[0].choices
    assert all(f"`{name} " in page or f"`{name}`" in page for name in commands)
    for command in ("plan", "convert", "diff"):
        options = set(re.findall(r"--[a-z][a-z-]+", commands[command].format_help())) - {"--help"}
        assert {option for option in options if option not in page} == set()
