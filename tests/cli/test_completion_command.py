"""Completion in shells that really run: what a script completes is what the program takes."""

import subprocess

import pytest

import orbax_t5x as ot
from orbax_t5x.cli.main import main, make_parser

pytestmark = pytest.mark.slow


@pytest.fixture
def complete(capsys, tmp_path):
    """What bash would offer for a line; the last word is the one being typed."""
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out

    def complete(*words):
        quoted = " ".join(f"'{word}'" for word in ("orbax-t5x", *words))
        find = "name=$(complete -p orbax-t5x | sed 's/.*-F \\([^ ]*\\).*/\\1/')"
        call = f"COMP_WORDS=({quoted}); COMP_CWORD={len(words)}; $name 2>/dev/null"
        code = f"{script}\n{find}\n{call}\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""
        done = subprocess.run(
            ["bash", "--norc", "--noprofile", "-c", code], capture_output=True, text=True, timeout=800, cwd=tmp_path
        )
        assert done.returncode == 0 and not done.stderr, done.stderr
        return done.stdout.split()

    return complete


def test_commands_and_their_options(complete):
    assert complete("in") == ["inspect"]
    assert {"inspect", "plan", "convert", "demo", "completion"} <= set(complete(""))
    assert {"--help", "--version"} <= set(complete("--"))
    assert complete("convert", "--ov") == ["--overwrite"]
    assert complete("convert", "source", "dest", "--form") == ["--format"]
    assert complete("nothing", "--a") == []


def test_values_of_options(complete):
    assert complete("convert", "--format", "") == ["orbax", "safetensors"]
    assert complete("plan", "a", "--resuming", "y") == ["yes"]
    assert complete("completion", "") == ["bash", "zsh", "fish"]
    assert complete("plan", "x", "--rules", "t5_minimal") == ["t5_minimal_to_scanned", "t5_minimal_to_unscanned"]
    assert set(complete("convert", "--rules", "")) - {"auto"} <= set(ot.rules.__all__)


def test_names_of_files(complete, tmp_path):
    for name in ("model.ckpt-3.index", "rules.json", "other"):
        (tmp_path / name).touch()
    assert complete("convert", "mod") == complete("diff", "a", "mod") == ["model.ckpt-3.index"]
    assert complete("plan", "a", "--map", "ru") == complete("convert", "a", "ru") == ["rules.json"]
    assert complete("plan", "a", "--target", "o") == complete("verify", "--item", "x", "o") == ["other"]
    assert complete("plan", "a", "--given", "o") == []


def test_every_option_that_is_completed_is_taken(complete):
    """argparse says so: its help of the command has the option."""
    for command in ("inspect", "plan", "convert", "diff", "demo"):
        options = complete(command, "--")
        taken = make_parser()._subparsers._group_actions[0].choices[command].format_help()
        assert options and all(option in taken for option in options)


@pytest.mark.parametrize(("shell", "first"), [("zsh", "#compdef orbax-t5x"), ("fish", "complete -c orbax-t5x")])
def test_other_shells_have_scripts_of_their_own(capsys, shell, first):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert first in script and "t5_minimal_to_scanned" in script
