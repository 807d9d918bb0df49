"""Rows as HTML: whole, escaped, and those of the table."""

import ast
import html
import html.parser
import re

import numpy as np
import pytest

import orbax_t5x as ot
from tests.support.memory_checkpoint import checkpoint
from tests.support.shown_plans import plan_with_every_row


@pytest.fixture
def t5_plan():
    return plan_with_every_row()


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
    parsed = re.findall(r"<td( class=\"name\")?(?: style=\"[^\"]*\")?>([^<]*(?:<wbr>[^<]*)*)", t5_plan._repr_html_())
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
    seen = ("/w", "float32[2,3] ×12") if kind == "checkpoint" else ("/w ×12", "(2, 3)")
    assert "<b>layer_{0…11}</b>/w" in text and all(told in text for told in seen)


@pytest.fixture
def tree():
    arrays = {f"decoder/layers_{number}/wi": np.zeros((2, 3), np.float32) for number in range(12)}
    return checkpoint(arrays | {"decoder/norm": np.zeros(3, np.float32), "step": np.zeros((), np.int32)})


def test_a_checkpoint_is_the_tree_of_the_command_line(tree):
    cells = re.findall(r"<td class=\"name\"(?: style=\"padding-left: ([\d.]+)em\")?>(.*?)</td>", tree._repr_html_())
    assert [(float(indent or 0), text.replace("<wbr>", "")) for indent, text in cells] == [
        (0.0, "decoder/"),
        (1.2, "layers_{0…11}/wi"),
        (1.2, "norm"),
        (0.0, "step"),
    ]


def test_fixes_are_blocks_to_copy(tree):
    target = {f"decoder_{i}": {"wi": np.zeros((2, 3), np.float32)} for i in range(3)}
    target["step"] = np.zeros((2, 2), np.int32)
    with pytest.raises(ot.RestorePlanError) as caught:
        ot.plan_restore(tree, target)
    codes = [html.unescape(code) for code in re.findall(r"<pre><code>(.*?)</code></pre>", caught.value._repr_html_())]
    assert codes
    for code in codes:  # each is arguments of a call
        ast.parse(f"f({code})")


def test_shown_objects_say_what_they_are_to_readers_of_screens(tree, t5_plan):
    for shown, label in ((tree, "checkpoint"), (t5_plan, "restore plan")):
        assert f'role="region" aria-label="{label}"' in shown._repr_html_()
        assert shown._repr_html_().count("<th ") == shown._repr_html_().count('<th scope="col"')
