"""The command line as its users meet it: what it prints, its exit codes, and that nothing is a traceback."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.cli import inspect_command
from orbax_t5x.cli.arguments import size_argument
from orbax_t5x.cli.main import main
from orbax_t5x.text.table import terminal_width

BUNDLE = Path(inspect_command.__file__).parent / "demo_data" / "model.ckpt-1000000"


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture
def run(capsys):
    """Runs a command in this process: exit code, standard output, standard error."""

    def run(*arguments):
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def layers(tmp_path):
    """A safetensors checkpoint of three alike layers, and one leaf for each dtype that matters."""
    arrays = {
        f"layers_{i}/{name}/kernel": np.full((4, 8), i, np.float32) for i in range(3) for name in ("wi_0", "wi_1")
    }
    arrays |= {"step": np.array(7, np.int64), "scale": np.ones(4, ml_dtypes.bfloat16)}
    path = tmp_path / "layers.safetensors"
    safetensors.numpy.save_file(arrays, path)
    return path


def process(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "orbax_t5x", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=800,
        **options,
    )


# -- inspect


def test_inspect_tells_the_tree(run, layers):
    code, out, err = run("inspect", layers)
    assert code == 0 and not err
    assert out.splitlines() == [
        f"{layers}: safetensors",
        "",
        "layers_{0…2}/                   768 B",
        "  wi_0/kernel  float32[4,8] ×3  384 B",
        "  wi_1/kernel  float32[4,8] ×3  384 B",
        "scale          bfloat16[4]        8 B",
        "step           int64[]            8 B",
        "",
        "8 leaves, 197 elements, 784 B",
        "  float32: 6 leaves, 768 B",
        "  bfloat16: 1 leaf, 8 B",
        "  int64: 1 leaf, 8 B",
    ]


def test_inspect_all_has_a_line_for_each_leaf(run, layers):
    _, out, _ = run("inspect", "--all", layers)
    assert out.count("kernel") == 6 and "…" not in out


def test_inspect_json_is_everything(run, layers):
    code, out, _ = run("inspect", "--json", layers)
    said = json.loads(out)
    with ot.open_checkpoint(layers) as checkpoint:
        assert code == 0 and said["format"] == "safetensors" and said["total_bytes"] == 784
        assert [leaf["name"] for leaf in said["leaves"]] == list(checkpoint.leaves)
        assert {leaf["name"]: (tuple(leaf["shape"]), leaf["dtype"], leaf["nbytes"]) for leaf in said["leaves"]} == {
            name: (view.shape, view.dtype.name, view.nbytes) for name, view in checkpoint.leaves.items()
        }


def test_inspect_the_demo_bundle(run):
    code, out, _ = run("inspect", BUNDLE)
    assert code == 0
    assert "tf_bundle, step 1000000" in out and "143 leaves, 18,913 elements, 73.9 KiB" in out
    (line,) = [line for line in out.splitlines() if line.split()[:1] == ["embedding"]]
    assert line.split() == ["embedding", "float32[128,16]", "8.00", "KiB"]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_inspect_fits_the_terminal(run, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    _, out, _ = run("inspect", BUNDLE)
    assert all(len(line) <= width for line in out.splitlines()[1:])


def test_inspect_shows_empty_nodes(tmp_path, run):
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "item", {"a": np.ones(2, np.float32), "none": None, "empty": {}})
    code, out, _ = run("inspect", tmp_path / "item")
    assert code == 0 and "None" in out and "a " in out


def test_a_leaf_that_is_also_a_branch_is_shown_as_both(tmp_path, run):
    path = tmp_path / "both.safetensors"
    safetensors.numpy.save_file(
        {"a": np.zeros(2, np.float32), "a/b": np.zeros(3, np.float32), "a/c": np.zeros(1)}, path
    )
    _, out, _ = run("inspect", path)
    names = [line.split()[0] for line in out.splitlines()[2:6]]
    assert names == ["a", "a/", "b", "c"]


@pytest.mark.slow
def test_inspect_waits_for_no_jax():
    code = (
        "import sys; from orbax_t5x.cli.main import main; "
        f"assert main(['inspect', {str(BUNDLE)!r}]) == 0; "
        "sys.exit(bool({'jax', 'flax', 'orbax', 'tensorflow'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, timeout=800).returncode == 0


# -- plan


def test_plan_translates_bundles(run):
    code, out, _ = run("plan", BUNDLE)
    assert code == 0 and "261 leaves" in out and "143 read · 118 constant" in out
    assert "target/decoder/layers_{0,1}/mlp/wi_0/kernel ×2" in out
    assert "decoder/block_{000,001}/layer_002/DenseReluDense/wi_0/kernel" in out


def test_plan_without_translation(run):
    code, out, _ = run("plan", "--no-translate", BUNDLE)
    assert code == 0 and "143 leaves" in out and "same name" in out


def test_plan_json(run):
    code, out, _ = run("plan", "--json", BUNDLE)
    said = json.loads(out)
    assert code == 0 and len(said["entries"]) == 261 and said["bytes_to_read"] == 75_656


def test_plan_for_another_checkpoint(run, layers, tmp_path):
    other = tmp_path / "other.safetensors"
    safetensors.numpy.save_file({f"blocks_{i}/kernel": np.zeros((4, 8), np.float32) for i in range(3)}, other)
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps([[r"blocks_(\d+)/kernel", r"layers_\1/wi_1/kernel"]]))
    code, out, err = run("plan", layers, "--target", other, "--map", rules, "--no-strict")
    assert code == 0, err
    assert "blocks_{0…2}/kernel ×3" in out and "layers_{0…2}/wi_1/kernel" in out


def test_plan_with_problems(run, layers, tmp_path):
    other = tmp_path / "other.safetensors"
    arrays = {f"layers_{i}/wi_0/kernel": np.zeros((4, 9), np.float32) for i in range(3)}
    safetensors.numpy.save_file({**arrays, "scale": np.zeros(4, ml_dtypes.float8_e4m3fn)}, other)
    code, out, err = run("plan", layers, "--target", other)
    assert code == 1 and not out and "Traceback" not in err
    assert "[shape] layers_{0…2}/wi_0/kernel ×3: the checkpoint has shape (4, 8), the target (4, 9)" in " ".join(
        err.split()
    )
    assert "pass --no-strict to leave them unread" in " ".join(err.split()) and len(err.splitlines()) < 60
    assert not re.search(r"strict=|allow_lossy_cast=", err)
    code, out, _ = run("plan", layers, "--target", other, "--json")
    kinds = {problem["kind"] for problem in json.loads(out)["problems"]}
    assert code == 1 and kinds == {"shape", "dtype", "leftover"}


def test_plan_of_a_bundle_for_translated_names_without_translation(run, tmp_path):
    assert run("convert", BUNDLE, tmp_path / "converted")[0] == 0
    code, _, err = run("plan", BUNDLE, "--no-translate", "--target", tmp_path / "converted")
    assert code == 1 and "Fix: pass --translate" in " ".join(err.split())
    assert run("plan", BUNDLE, "--target", tmp_path / "converted")[0] == 0


def test_fixes_are_options_or_say_that_they_are_not(run, layers, tmp_path):
    """Of dtypes: one option permits what rounds; what is cut to an integer has none."""
    other = tmp_path / "other.safetensors"
    first, second, third = (f"layers_{i}/wi_0/kernel" for i in range(3))
    arrays = {first: np.zeros((4, 8), np.float16), second: np.zeros((4, 8), np.int32)}
    arrays[f"x_{third}"] = np.zeros((4, 8), np.float32)
    safetensors.numpy.save_file(arrays, other)
    code, _, err = run("plan", layers, "--target", other)
    text = " ".join(err.split())
    assert code == 1
    assert "Fix: pass --allow-lossy-cast" in text
    assert f"Fix: in Python, add transforms=[ot.transforms.Cast('{second}', 'int32')]" in text
    assert f'Fix: give the rule ["x_{third}", "{third}"] by --map' in text


def test_plan_asks_for_what_the_record_disagrees_with(run, tmp_path):
    """A checkpoint written by one chain, planned with another: the answer is an option."""
    assert run("convert", BUNDLE, tmp_path / "out")[0] == 0
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps([["target/encoder/encoder_norm/scale", "target/decoder/decoder_norm/scale"]]))
    arguments = ["plan", tmp_path / "out", "--target", tmp_path / "out", "--map", rules, "--no-strict"]
    code, out, err = run(*arguments, "--resuming", "no")
    assert code == 0 and "target/decoder/decoder_norm/scale" in out, err
    code, out, _ = run(*arguments, "--resuming", "yes", "--explain", "target/encoder/encoder_norm/scale")
    assert code == 0 and "the names match" in out
    _, _, err = run(*arguments)
    assert "is_resuming" not in err


def test_plan_explains_a_leaf(run):
    code, out, _ = run("plan", BUNDLE, "--explain", "target/token_embedder/embedding")
    assert code == 0 and "shared/embedding  float32[128,16]" in out and "8.00 KiB in 1 box for 1 shard here" in out
    code, _, err = run("plan", BUNDLE, "--explain", "target/token_embedder/embeddin")
    assert code == 2 and "closest: target/token_embedder/embedding" in err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "not JSON"),
        ('{"a": "b"}', "not an object"),
        ('["ab"]', 'rule 0 is "ab"'),
        ('[["a", 1]]', 'rule 0 is ["a", 1]'),
        ('[["a", "b"], ["(", null]]', "rule 1: '(' is no regular expression"),
    ],
)
def test_rules_that_are_none(run, layers, tmp_path, text, told):
    rules = tmp_path / "rules.json"
    rules.write_text(text)
    code, _, err = run("plan", layers, "--target", layers, "--map", rules)
    assert code == 2 and told in err and len(err.splitlines()) == 1


def test_rules_need_a_target_and_a_file(run, layers, tmp_path):
    code, _, err = run("plan", layers, "--map", tmp_path / "rules.json")
    assert code == 2 and "--map needs --target" in err
    code, _, err = run("plan", layers, "--target", layers, "--map", tmp_path / "rules.json")
    assert code == 2 and "No such file" in err


# -- convert


def test_convert_a_bundle_is_what_stock_orbax_reads(run, tmp_path):
    code, out, err = run("convert", BUNDLE, tmp_path / "out")
    assert code == 0 and not err and out.startswith(f"261 leaves (74.3 KiB) in {tmp_path}/out, in ")
    tree = ocp.PyTreeCheckpointer().restore(tmp_path / "out")
    with np.load(BUNDLE.parent / "as_t5x_imports_it.npz") as expected:
        embedding = tree["target"]["token_embedder"]["embedding"]
        np.testing.assert_array_equal(embedding, expected["target/token_embedder/embedding"])


def test_convert_never_overwrites_unasked(run, tmp_path):
    assert run("convert", BUNDLE, tmp_path / "out")[0] == 0
    code, _, err = run("convert", BUNDLE, tmp_path / "out")
    assert code == 1 and "--overwrite" in err
    code, out, _ = run("convert", BUNDLE, tmp_path / "out", "--overwrite", "--dtype", "bfloat16", "--json")
    assert code == 0 and json.loads(out)["leaves"] == 261
    with ot.open_checkpoint(tmp_path / "out") as checkpoint:
        assert checkpoint.leaves["target/token_embedder/embedding"].dtype == ml_dtypes.bfloat16
        assert checkpoint.leaves["state/param_states/token_embedder/embedding/v_row"].dtype == np.float32


def test_convert_names_what_orbax_cannot_store(run, tmp_path):
    path = tmp_path / "empty.safetensors"
    safetensors.numpy.save_file({"none": np.zeros((0, 2), np.float32), "some": np.ones(2, np.float32)}, path)
    code, _, err = run("convert", path, tmp_path / "out")
    assert code == 1 and "'none'" in err and "--on-unsupported skip" in err
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["empty.safetensors"]
    code, out, _ = run("convert", path, tmp_path / "out", "--on-unsupported", "skip")
    assert code == 0 and out.startswith("1 leaf (8 B)")
    assert "left out, because Orbax cannot store it: none  float32[0,2]" in out


def test_convert_refuses_an_unknown_dtype(run, tmp_path):
    code, _, err = run("convert", BUNDLE, tmp_path / "out", "--dtype", "bflat16")
    assert code == 2 and "bflat16" in err and not (tmp_path / "out").exists()


# The program, in a process that interrupts reach wherever the tests run (a shell's background job ignores them) and
# that says when it begins to read array bytes.
_TELLS_WHEN_IT_READS = """
import os, signal, sys
from orbax_t5x.cli.main import main
from orbax_t5x.storage.files import FileSet
signal.signal(signal.SIGINT, signal.default_int_handler)
acquire = FileSet.acquire
def watched(files, file, leaf):
    if leaf is not None:
        os.write(1, b"reading\\n")  # in one call: several threads read
    return acquire(files, file, leaf)
FileSet.acquire = watched
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


# -- the program


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

    monkeypatch.setattr(inspect_command, "run", interrupted)
    assert run("inspect", layers) == (130, "", "orbax-t5x: interrupted\n")


@pytest.mark.parametrize(
    "error", [RuntimeError("a\n\x1b[2Jb"), MemoryError(), RecursionError("deep"), OSError(28, "full")]
)
def test_what_nobody_foresaw_is_one_line_and_1(run, layers, monkeypatch, error):
    def broken(options):
        raise error

    monkeypatch.setattr(inspect_command, "run", broken)
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


@pytest.mark.parametrize(
    ("text", "count"), [("7", 7), ("256M", 256 << 20), ("256MiB", 256 << 20), ("1.5G", 3 << 29), ("64 kb", 64 << 10)]
)
def test_sizes(text, count):
    assert size_argument(text) == count


@pytest.mark.parametrize("text", ["", "0", "M", "-1", "1X", "0.1"])
def test_sizes_that_are_none(text, capsys):
    assert main(["convert", "source", "destination", f"--memory-limit={text}"]) == 2
    assert f"argument --memory-limit: {text!r} is no size; write bytes" in capsys.readouterr().err


def test_width_without_a_terminal(monkeypatch):
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: (_ for _ in ()).throw(OSError()))
    assert terminal_width() == 120
