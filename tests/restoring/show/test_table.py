"""A plan's texts: rows that fold say exactly what they stand for, nothing is cut, no name is markup or a control."""

import html.parser
import itertools
import json
import re
import sys

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_t5x as ot
from tests.support.memory_checkpoint import checkpoint

LAYERS = 12


def mesh():
    return Mesh(np.asarray(jax.devices()).reshape(2, 4), ("data", "model"))


def leaf(shape, spec=None, dtype=np.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=None if spec is None else NamedSharding(mesh(), spec))


@pytest.fixture
def t5_plan():
    """Layers under other names, a cast, a stack, a constant, a fallback, a placeholder, leaves unused and dropped."""
    arrays = {f"encoder/block_{i:03d}/q": np.zeros((8, 16), np.float32) for i in range(LAYERS)}
    arrays |= {f"decoder/block_{i:03d}/q": np.full((4, 8), i, np.float32) for i in range(LAYERS)}
    arrays |= {f"encoder/block_{i:03d}/wi_{j}": np.zeros((8, 32), np.float32) for i in range(LAYERS) for j in range(2)}
    arrays |= {"embedding": np.zeros((64, 8), jax.numpy.bfloat16), "left/over": np.zeros(3), "gone": np.zeros(2)}
    target = {
        "layers": {f"layers_{i}": {"query": leaf((8, 16), P(None, "model"))} for i in range(LAYERS)},
        "wi": {f"layers_{i}": {f"wi_{j}": leaf((8, 32), P("data", "model")) for j in range(2)} for i in range(LAYERS)},
        "stacked": leaf((4, LAYERS, 8), P(None, None, "model")),
        "embedding": leaf((64, 8), P("model")),
        "constant": leaf((2,)),
        "new": leaf((4,), P()),
        "kept": ...,
    }

    def rules(state, target):
        encoder = state.pop("encoder")
        decoder = state.pop("decoder")
        state.pop("gone")
        blocks = range(LAYERS)
        state["layers"] = {f"layers_{i}": {"query": encoder[f"block_{i:03d}"]["q"]} for i in blocks}
        state["wi"] = {
            f"layers_{i}": {f"wi_{j}": encoder[f"block_{i:03d}"][f"wi_{j}"] for j in range(2)} for i in blocks
        }
        state["stacked"] = ot.stack([decoder[f"block_{i:03d}"]["q"] for i in blocks], 1)
        state["constant"] = np.ones(2, np.float32)
        return state

    return ot.plan_restore(checkpoint(arrays), target, rules, strict=False, fallback={"new": np.zeros(4, np.float32)})


# -- the table


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
    assert long in str(plan).splitlines()


def test_bytes_are_those_of_the_shards_here(t5_plan):
    entry = next(entry for entry in t5_plan.to_json()["entries"] if entry["name"] == "stacked")
    assert entry["bytes"] == 4 * LAYERS * 8 * 4 and t5_plan.bytes_to_read == sum(
        entry["bytes"] for entry in t5_plan.to_json()["entries"]
    )


def test_long_tables_stop_and_say_where_the_rest_is():
    words = ["".join(letters) for letters in itertools.product("abcdefgh", repeat=3)]
    plan = ot.plan_restore(checkpoint({f"{word}/w": np.zeros(1, np.float32) for word in words}), None)
    text = str(plan)
    assert len(text.splitlines()) < 3 * 200 + 10
    assert f"… and {len(words) - 200} leaves more: see `plan.entries` or `plan.to_json()`" in text
    assert len(plan.to_json()["entries"]) == len(words)


def test_the_table_says_what_an_execution_did(t5_plan):
    assert "Executed" not in str(t5_plan)
    t5_plan.execute()
    assert re.search(
        r"Executed: \S+ KiB read in \d+\.\d\d s, \d+ leaves without checksum\.", " ".join(str(t5_plan).split())
    )


def test_a_leaf_of_the_fallback_takes_one_line(monkeypatch):
    new = {f"part_{letter}/{'x' * 10}": leaf((4 + size,), P()) for size, letter in enumerate("abcdef")}
    target = {**new, "old": leaf((8,), P("model"))}
    fallback = {name: np.zeros(one.shape, np.float32) for name, one in new.items()}
    plan = ot.plan_restore(checkpoint({"old": np.zeros(8, np.float32)}), target, fallback=fallback)
    monkeypatch.setenv("COLUMNS", "60")
    lines = [line for line in str(plan).splitlines() if line.startswith("part_")]
    assert len(lines) == len(new) and all("fallback" in line and "float32[" in line for line in lines)


def test_a_printed_report_folds_names():
    arrays = {f"layers_{i}/w": np.zeros(4, np.float32) for i in range(24)}
    plan = ot.plan_restore(checkpoint(arrays), None)
    plan.execute()
    summary, *lines = str(plan.report).splitlines()
    assert re.fullmatch(r"384 B read in \d+\.\d\d s, 24 leaves without checksum", summary)
    assert lines == ["without checksum:", "  layers_{0…23}/w ×24"]
    assert repr(plan.report) == f"<RestoreReport: {summary}>" and f"Executed: {summary}." in str(plan)


def test_constants_are_listed_apart(t5_plan, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    rows, _, section = str(t5_plan).partition("Constants: put there by a transform, not read (1):\n")
    assert section.startswith("  constant  float32[2]\n") and "constant  " not in rows
    assert "constant  float32[2]" in t5_plan._repr_html_()


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


def test_work_grows_with_the_leaves_not_faster():
    """Counted in calls: time is the machine's, and a collection of garbage costs more than the whole."""

    def calls(count):
        arrays = {f"layers_{i // 50}/part_{i % 50}/{'abc'[i % 3]}": np.zeros(1, np.float32) for i in range(count)}
        plan = ot.plan_restore(checkpoint(arrays), None)
        total = 0

        def note(frame, event, argument):
            nonlocal total
            total += event in ("call", "c_call")

        sys.setprofile(note)
        try:
            str(plan), plan.to_json(), plan._repr_html_(), plan.diff(plan)
        finally:
            sys.setprofile(None)
        return total

    assert 1_000 < calls(2_000) < 6 * calls(500)


# -- HTML


class Checked(html.parser.HTMLParser):
    """Collects tags and text; complains about tags that do not close."""

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.text = [], set(), []

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        if tag == "wbr":  # it has no end, and breaks no text
            return
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_html_is_whole_and_escaped():
    name = "<script>alert('&amp;')</script>/w"
    plan = ot.plan_restore(
        checkpoint({name: np.zeros(2, np.float32), "<b>unused": np.zeros(1)}),
        {"<script>alert('&amp;')<": {"script>": {"w": np.zeros(2, np.float32)}}},
        strict=False,
    )
    parsed = Checked()
    parsed.feed(plan._repr_html_())
    parsed.close()
    assert not parsed.open and parsed.seen == {
        "div",
        "style",
        "p",
        "b",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "span",
        "details",
        "summary",
        "ul",
        "li",
        "wbr",
    }
    assert name in "".join(parsed.text) and any("<b>unused" in text for text in parsed.text)


def test_every_name_in_html_can_break(t5_plan):
    """Cells that may be long have no `nowrap`; in a page as wide as a notebook no column lies outside."""
    parsed = re.findall(r"<td( class=\"name\")?>([^<]*(?:<wbr>[^<]*)*)", t5_plan._repr_html_())
    assert all(named for named, text in parsed if "layers_" in text or "block_" in text)
    assert "td.name {white-space: normal; overflow-wrap: anywhere" in t5_plan._repr_html_()


def test_html_has_the_rows_of_the_table(t5_plan):
    text = t5_plan._repr_html_().replace("<wbr>", "")
    for told in ("layers/layers_{0…11}/query ×12", "encoder/block_{000…011}/q", "stack of 12 on axis 1", "left/over"):
        assert told in text


@pytest.mark.parametrize("kind", ["checkpoint", "error"])
def test_checkpoints_and_errors_are_html_too(kind):
    name = "<b>layer_{}</b>/w"
    arrays = {name.format(number): np.zeros((2, 3), np.float32) for number in range(12)}
    shown = checkpoint(arrays)
    if kind == "error":
        with pytest.raises(ot.RestorePlanError) as caught:
            ot.plan_restore(shown, dict.fromkeys(arrays, np.zeros(5, np.float32)))
        shown = caught.value
    parsed = Checked()
    parsed.feed(shown._repr_html_())
    parsed.close()
    assert not parsed.open
    text = "".join(parsed.text)
    assert "<b>layer_{0…11}</b>/w ×12" in text and ("float32[2,3]" if kind == "checkpoint" else "(2, 3)") in text


# -- explain


def test_explain_a_leaf_that_is_read(t5_plan):
    text = t5_plan.explain("layers/layers_3/query")
    for told in (
        "layers/layers_3/query: a leaf of the target, read from the checkpoint",
        "float32[8,16], 512 B",
        "encoder/block_003/q  float32[8,16]",
        "P(None, 'model') over data=2, model=4 (8 devices)",
        "512 B in 4 boxes for 4 shards here",
        "[0:8, 4:8]  128 B",
        "rules",
    ):
        assert told in text, told


def test_explain_a_stack_and_a_cast(t5_plan):
    stacked = t5_plan.explain("stacked")
    assert "stack of 12 on axis 1" in stacked and "… and 4 sources more" in stacked
    assert "of decoder/block_000/q" in stacked
    assert "bfloat16 -> float32: every value survives" in t5_plan.explain("embedding")


def test_explain_what_is_not_read(t5_plan):
    assert "the fallback gives it" in t5_plan.explain("new")
    assert "left as it is" in t5_plan.explain("kept")
    assert "a constant that a transform put there" in t5_plan.explain("constant")


def test_explain_leaves_of_the_checkpoint(t5_plan):
    assert "goes to   layers/layers_3/query" in t5_plan.explain("encoder/block_003/q")
    assert "goes to   stacked (stack of 12 on axis 1)" in t5_plan.explain("decoder/block_003/q")
    assert "unused" in t5_plan.explain("left/over")
    assert "dropped" in t5_plan.explain("gone")


def test_a_name_of_both_sides_is_explained_on_both(t5_plan):
    text = t5_plan.explain("embedding")
    assert "embedding: a leaf of the target" in text and "embedding: a leaf of the checkpoint" in text


def test_explain_an_unknown_name(t5_plan):
    with pytest.raises(
        KeyError, match="neither the target nor the checkpoint has a leaf 'layers/layers_3/quer'"
    ) as caught:
        t5_plan.explain("layers/layers_3/quer")
    assert "layers/layers_3/query" in caught.value.args[0].partition("closest: ")[2]


def test_explain_names_the_source_among_several():
    sources = {"a": checkpoint({"x": np.zeros(2, np.float32)}), "b": checkpoint({"x": np.ones(2, np.float32)})}
    plan = ot.plan_restore(sources, None)
    assert "in /memory" in plan.explain("b/x")


def test_an_entry_says_all_that_happens_and_its_cast():
    arrays = {"a": np.zeros((2, 3), np.float16), "b": np.zeros((3, 2), np.float16), "c": np.zeros(2, np.float16)}

    def join(state, target):
        return {"joined": ot.concatenate([state["a"].T, state["b"]], 0), "c": state["c"]}

    target = {"joined": leaf((6, 2)), "c": leaf((2,)), "new": leaf((2,))}
    plan = ot.plan_restore(checkpoint(arrays), target, join, fallback={"new": np.zeros(2, np.float16)})
    expected = {
        "joined": "transpose (1, 0) of input 1, concatenation of 2 on axis 0, cast float32",
        "c": "cast float32",
        "new": "cast float32",
    }
    assert {entry.name: entry.how for entry in plan.entries} == expected
    assert {entry["name"]: entry["how"] for entry in plan.to_json()["entries"]} == expected
    assert all(how in plan.explain(name) for name, how in expected.items())


# -- diff


def planned(target, arrays, **options):
    return ot.plan_restore(checkpoint(arrays), target, strict=False, **options)


def test_equal_plans_differ_in_nothing(t5_plan):
    assert t5_plan.diff(t5_plan) == ""


def test_diff_says_each_difference_once_for_all_layers():
    arrays = {f"layers_{i}/w": np.zeros((8, 4), np.float32) for i in range(6)} | {
        "old": np.zeros(1),
        "x": np.zeros(8, np.float32),
    }
    ours = planned({f"layers_{i}": {"w": leaf((8, 4), P())} for i in range(6)} | {"x": leaf((8,))}, arrays)
    theirs = planned(
        {f"layers_{i}": {"w": leaf((8, 4), P("data"))} for i in range(6)} | {"old": np.zeros(1), "new": ...}, arrays
    )
    lines = ours.diff(theirs).splitlines()
    assert lines == [
        "- x",
        "+ new",
        "+ old",
        "~ layers_{0…5}/w ×6: sharding P() -> P('data')",
        "  no longer unused: old",
        "  newly unused: x",
        "this process reads 800 B -> 776 B",
    ]


def test_diff_sees_other_sources_and_casts():
    arrays = {"a": np.zeros(4, np.float32), "b": np.zeros(4, np.float32), "c": np.zeros(4, np.float16)}

    def swap(state, target):
        return {**state, "a": state["b"], "b": state["a"], "c": state["c"].astype(np.float32)}

    target = {name: np.zeros(4, np.float32) for name in "abc"}
    text = planned(target, arrays).diff(planned(target, arrays, transforms=[swap]))
    assert "~ a: from a -> b" in text and "~ b: from b -> a" in text


# -- JSON


def test_json_says_everything(t5_plan):
    said = json.loads(json.dumps(t5_plan.to_json()))
    entries = {entry["name"]: entry for entry in said["entries"]}
    assert set(entries) == {entry.name for entry in t5_plan.entries}
    assert entries["layers/layers_3/query"] | {"rule": ""} == {
        "name": "layers/layers_3/query",
        "action": "read",
        "fidelity": "",
        "sources": ["encoder/block_003/q"],
        "how": "",
        "rule": "",
        "shape": [8, 16],
        "dtype": "float32",
        "kind": "jax",
        "sharding": {
            "type": "NamedSharding",
            "devices": 8,
            "memory_kind": entries["layers/layers_3/query"]["sharding"]["memory_kind"],
            "spec": [None, "model"],
            "mesh": {"data": 2, "model": 4},
        },
        "bytes": 512,
    }
    assert entries["kept"]["dtype"] is None and entries["kept"]["action"] == "keep"
    assert said["unused"] == ["left/over"] and said["dropped"] == ["gone"]
    assert said["sources"] == {"": {"path": "/memory", "format": "orbax", "step": None}}
