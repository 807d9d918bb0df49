"""A plan's texts: rows that fold say exactly what they stand for, nothing is cut, no name is markup or a control."""

import itertools
import re

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import orbax_t5x as ot
from tests.support.memory_checkpoint import checkpoint
from tests.support.shown_plans import leaf


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_table_fits_the_terminal(t5_plan, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    lines = str(t5_plan).splitlines()
    assert max(map(len, lines)) <= width
    text = " ".join(str(t5_plan).split())
    for told in (
        "layers/layers_{0…11}/query ×12",
        "encoder/block_{000…011}/q",
        "wi/layers_{0…11}/wi_1 ×12",
        "stack of 12 on axis 1",
        "cast float32",
        "float32[4,12,8]",
        "P('data', 'model')",
        "Mesh: data=2, model=4 (8 devices)",
        "1 fallback",
        "1 kept as it is",
        "left/over",
        "gone",
    ):
        assert told in text, told


def test_a_wide_table_has_one_line_a_row(t5_plan, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    (line,) = [line for line in str(t5_plan).splitlines() if "layers/layers_" in line]
    assert line.split() == (
        "layers/layers_{0…11}/query ×12 float32[8,16] P(None, 'model') 6.00 KiB encoder/block_{000…011}/q".split()
    )


def test_a_narrow_table_never_cuts_a_name(monkeypatch):
    long = "target/" + "/".join(["encoder_decoder_attention"] * 6) + "/kernel"
    source = checkpoint({long: np.zeros(4, np.float32)})
    plan = ot.plan_restore(source, None)
    monkeypatch.setenv("COLUMNS", "80")
    lines = str(plan).splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("target/"))
    name = [line.strip().split("  ")[0] for line in lines[first : first + 3]]
    assert "".join(name) == long and name[0].endswith("/") and name[1].endswith("/")
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("width", [80, 200])
def test_the_plan_of_a_whole_model_fits_the_terminal(monkeypatch, goldens, width):
    monkeypatch.setenv("COLUMNS", str(width))
    plan = ot.plan_restore(goldens / "tf_bundle" / "t5_1_1_f32", None, ot.transforms.Translate())
    plan.checkpoints[""].path = "model.ckpt"  # a path is never broken
    assert max(map(len, str(plan).splitlines())) <= width


def test_long_tables_stop_and_say_where_the_rest_is():
    words = ["".join(letters) for letters in itertools.product("abcdefgh", repeat=3)]
    plan = ot.plan_restore(checkpoint({f"{word}/w": np.zeros(1, np.float32) for word in words}), None)
    text = str(plan)
    assert len(text.splitlines()) < 3 * 200 + 10
    assert f"… and {len(words) - 200} leaves more: see `plan.entries` or `plan.to_json()`" in text
    assert len(plan.to_json()["entries"]) == len(words)


def test_a_printed_report_folds_names():
    arrays = {f"layers_{i}/w": np.zeros(4, np.float32) for i in range(24)}
    plan = ot.plan_restore(checkpoint(arrays), None)
    plan.execute()
    summary, *lines = str(plan.report).splitlines()
    assert re.fullmatch(r"384 B read in \d+\.\d\d s, 24 leaves without checksum", summary)
    assert lines == ["without checksum:", "  layers_{0…23}/w ×24"]
    assert repr(plan.report) == f"<RestoreReport: {summary}>" and f"Executed: {summary}." in str(plan)


def test_a_few_long_rows_do_not_narrow_a_wide_table(monkeypatch):
    arrays = {f"part_{letter}/w": np.zeros(4, np.float32) for letter in "abcdefgh"}
    arrays["x" * 150] = np.zeros(4, np.float32)
    target = {**{name: leaf((4,)) for name in arrays if name[0] == "p"}, "short": leaf((4,), P("model"))}
    plan = ot.plan_restore(checkpoint(arrays), target, ot.transforms.Rename([("x+", "short")]))
    monkeypatch.setenv("COLUMNS", "150")
    lines = str(plan).splitlines()
    assert "    ← " + "x" * 150 in lines
    assert sum(line.startswith("part_") and line.endswith("same name") for line in lines) == 8


def test_names_cannot_move_the_cursor():
    plan = ot.plan_restore(checkpoint({"a\x1b[2J\nb": np.zeros(1, np.float32)}), None)
    for text in (str(plan), plan.explain("a\x1b[2J\nb")):
        assert "\x1b" not in text and "a\\x1b[2J\\nb" in text
