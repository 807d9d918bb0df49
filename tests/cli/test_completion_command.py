"""Completion in shells that really run: what a script completes is what the program takes."""

import subprocess

import pytest

import orbax_t5x as ot
from orbax_t5x.cli.main import main, make_parser

pytestmark = pytest.mark.slow


@pytest.fixture
def script(capsys):
    assert main(["completion", "bash"]) == 0
    return capsys.readouterr().out


@pytest.fixture
def complete(script, tmp_path):
    """What bash would offer for a line; the last word is the one being typed."""

    def complete(*words):
        quoted = " ".join(f"'{word}'" for word in ("orbax-t5x", *words))
        call = f"COMP_WORDS=({quoted}); COMP_CWORD={len(words)}; _orbax_t5x"
        code = f"{script}\n{call}\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""
        done = subprocess.run(
            ["bash", "--norc", "--noprofile", "-c", code], capture_output=True, text=True, timeout=800, cwd=tmp_path
        )
        assert done.returncode == 0 and not done.stderr, done.stderr
        return done.stdout.split()

    return complete


def test_commands_and_their_options(complete):
    assert complete("in") == ["inspect"]
    assert {"inspect", "plan", "convert", "demo", "completion", "--help", "--version"} <= set(complete(""))
    assert complete("convert", "--ov") == ["--overwrite"]
    assert complete("convert", "source", "dest", "--form") == ["--format"]
    assert complete("nothing", "--a") == []


def test_values_of_options(complete):
    assert complete("convert", "--format", "") == ["orbax", "safetensors"]
    assert complete("plan", "a", "--resuming", "y") == ["yes"]
    assert complete("completion", "") == ["bash", "zsh"]
    assert complete("plan", "x", "--rules", "t5_minimal") == ["t5_minimal_to_scanned", "t5_minimal_to_unscanned"]
    assert set(complete("convert", "--rules", "")) - {"auto"} <= set(ot.rules.__all__)


def test_names_of_files_are_left_to_the_shell(complete, script):
    assert complete("convert", "") == complete("plan", "a", "--map", "") == []
    assert "complete -o default -F _orbax_t5x orbax-t5x" in script


def test_every_option_that_is_completed_is_taken(complete):
    """argparse says so: its help of the command has the option."""
    for command in ("inspect", "plan", "convert", "diff", "demo"):
        options = complete(command, "--")
        taken = make_parser()._subparsers._group_actions[0].choices[command].format_help()
        assert options and all(option in taken for option in options)


def test_zsh_runs_the_same_script(capsys, script):
    assert main(["completion", "zsh"]) == 0
    said = capsys.readouterr().out
    assert said.endswith(script) and said.removesuffix(script).splitlines()[-1].endswith("bashcompinit")
