"""The command line as its users meet it: what it prints, its exit codes, and that nothing is a traceback."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.cli import inspect_command
from orbax_t5x.cli.main import COMMANDS

BUNDLE = Path(inspect_command.__file__).parent / "demo_data" / "model.ckpt-1000000"


def process(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "orbax_t5x", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=800,
        **options,
    )


# The program, in a process that interrupts reach wherever the tests run (a shell's background job ignores them) and
# that says when it begins to read array bytes.
_TELLS_WHEN_IT_READS = """
import os, signal, sys
from orbax_t5x.cli.main import main
from orbax_t5x.files.local_file import OpenFiles
signal.signal(signal.SIGINT, signal.default_int_handler)
acquire = OpenFiles.acquire
def watched(files, file, leaf):
    if leaf is not None:
        os.write(1, b"reading\\n")  # in one call: several threads read
    return acquire(files, file, leaf)
OpenFiles.acquire = watched
sys.exit(main())
"""


@pytest.mark.slow
def test_an_interrupt_ends_it_and_leaves_nothing(tmp_path):
    source = tmp_path / "large.safetensors"
    header = json.dumps({"a": {"dtype": "F32", "shape": [1 << 30], "data_offsets": [0, 1 << 32]}}).encode()
    with source.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + (1 << 32))
    command = [sys.executable, "-c", _TELLS_WHEN_IT_READS, "convert", str(source), str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "reading\n"
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=800)
    assert child.returncode == 130 and "Traceback" not in err and "interrupted" in err
    assert [entry.name for entry in tmp_path.iterdir()] == ["large.safetensors"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["inspct", "a"], "invalid choice: 'inspct'"),
        (["inspct", "a"], "did you mean 'inspect'?"),
        (["convert", "a", "b", "--format", "safetensor"], "did you mean 'safetensors'?"),
        (["convert", "a", "b", "--overwite"], "unrecognized arguments: --overwite; did you mean '--overwrite'?"),
        (["diff", "a", "b", "--atoll=1e-6"], "did you mean '--atol'?"),
        (["inspect", "a", "--jsn=3"], "did you mean '--json'?"),
        (["convert", "a", "b", "--dtype", "bf16"], "--dtype 'bf16' names no dtype; did you mean 'bfloat16'?"),
    ],
)
def test_a_misspelt_word_is_answered_with_the_closest(run, arguments, told):
    code, out, err = run(*arguments)
    assert code == 2 and not out and told in err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["inspect"],
        ["nonsense"],
        ["convert", "a"],
        ["convert", "a", "b", "--memory-limit", "many"],
        ["convert", "a", "b", "--on-unsupported", "what"],
    ],
)
def test_wrong_usage_is_2(run, arguments):
    code, out, err = run(*arguments)
    assert code == 2 and not out and "usage: orbax-t5x" in err


def test_help_and_version_are_0(run):
    assert run("--version") == (0, f"orbax-t5x {ot.__version__}\n", "")
    for arguments in ([], ["inspect"], ["plan"], ["convert"], ["diff"], ["verify"], ["demo"]):
        code, out, _ = run(*arguments, "--help")
        assert code == 0 and "usage" in out


@pytest.mark.parametrize("command", [["inspect"], ["plan"], ["convert", "{}/out"], ["diff", "{}"], ["verify"]])
def test_a_missing_checkpoint_is_one_line(run, tmp_path, command):
    first, *rest = (part.format(tmp_path) for part in command)
    code, out, err = run(first, tmp_path / "nothing", *rest)
    assert code == 1 and not out and len(err.splitlines()) == 1 and str(tmp_path / "nothing") in err


def test_damage_is_one_line(run, tmp_path):
    for file in BUNDLE.parent.glob("model.ckpt*"):
        shutil.copy(file, tmp_path)
    index = tmp_path / "model.ckpt-1000000.index"
    content = bytearray(index.read_bytes())
    content[100] ^= 1
    index.write_bytes(content)
    code, _, err = run("inspect", tmp_path)
    assert code == 1 and str(index) in err and len(err.splitlines()) == 1


@pytest.mark.slow
def test_a_closed_pipe_ends_it_quietly(layers):
    read, write = os.pipe()
    os.close(read)
    finished = subprocess.run(
        [sys.executable, "-m", "orbax_t5x.cli", "inspect", str(layers)],
        stdout=write,
        stderr=subprocess.PIPE,
        timeout=800,
    )
    os.close(write)
    assert finished.returncode == 141 and finished.stderr == b""


@pytest.mark.slow
def test_an_output_that_lacks_a_sign_still_gets_the_text(layers):
    finished = process("inspect", layers, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert finished.returncode == 0 and "layers_{0\\u20262}/" in finished.stdout


def test_an_interrupt_is_130(run, layers, monkeypatch):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(COMMANDS, "get", lambda _: interrupted)
    assert run("inspect", layers) == (130, "", "orbax-t5x: interrupted\n")


@pytest.mark.parametrize(
    "error", [RuntimeError("a\n\x1b[2Jb"), MemoryError(), RecursionError("deep"), OSError(28, "full")]
)
def test_what_nobody_foresaw_is_one_line_and_1(run, layers, monkeypatch, error):
    def broken(options):
        raise error

    monkeypatch.setattr(COMMANDS, "get", lambda _: broken)
    monkeypatch.delenv("ORBAX_T5X_TRACEBACK", raising=False)
    code, out, told = run("inspect", layers)
    assert (code, out, told.count("\n")) == (1, "", 1)
    assert told.startswith(f"orbax-t5x: unexpected {type(error).__name__}") and "\x1b" not in told
    assert "ORBAX_T5X_TRACEBACK=1" in told and "Traceback" not in told
    monkeypatch.setenv("ORBAX_T5X_TRACEBACK", "1")
    code, _, told = run("inspect", layers)
    assert code == 1 and "in broken" in told and told.splitlines()[-1].startswith("orbax-t5x: unexpected")


def test_names_cannot_move_the_cursor(run, tmp_path):
    path = tmp_path / "evil.safetensors"
    safetensors.numpy.save_file({"a\x1b[2J/b": np.zeros(2, np.float32)}, path)
    for command in ("inspect", "plan"):
        code, out, _ = run(command, path)
        assert code == 0 and "\x1b" not in out and "a\\x1b[2J/b" in out
