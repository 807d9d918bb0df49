"""Reports as text, HTML and JSON."""

import dataclasses
import html
import json
import math

import pytest

from orbax_t5x.text.report import Page, Report, Section, counts_text, status_sections
from orbax_t5x.text.table import TableRow


@dataclasses.dataclass(frozen=True)
class Leaf:
    name: str
    status: str
    reason: str = ""
    value: object = 0


@dataclasses.dataclass(frozen=True)
class Leaves(Report):
    leaves: tuple[Leaf, ...]
    warnings: tuple[str, ...] = ()

    def page(self):
        sections = status_sections(self.leaves, {"bad": "broken leaves"}, lambda _: "int8[2]", lambda _, why: why)
        end = counts_text(self.leaves, {"bad": "broken", "good": "whole"})
        hidden = Section("names", names=["<one>", "two"], left_out="… and 3 more")
        return Page(TableRow("leaf", "array"), "", ["from a\x1b"], [*sections, hidden], self.warnings, end)


REPORT = Leaves(
    (*(Leaf(f"layer_{number}", "bad", "no bytes") for number in range(3)), Leaf("step", "good")), ("careful",)
)


def test_text_has_every_part_in_order():
    assert REPORT.page().text(60).splitlines() == [
        "from a\\x1b",
        "",
        "broken leaves:",
        "layer_{0…2} ×3  int8[2]  no bytes",
        "",
        "names:",
        "  <one>",
        "  two",
        "… and 3 more",
        "",
        "Warnings:",
        "  - careful",
        "",
        "3 leaves broken, 1 leaf whole",
    ]
    assert str(Leaves(())).endswith("no leaves")


def test_html_is_the_escaped_text():
    assert html.unescape(REPORT._repr_html_()) == f"<pre>{REPORT}</pre>" and "&lt;one&gt;" in REPORT._repr_html_()


@pytest.mark.parametrize(("value", "shown"), [(math.inf, "inf"), (1j, "1j"), (1.5, 1.5), (None, None), (True, True)])
def test_json_has_no_number_that_json_lacks(value, shown):
    data = Leaves((Leaf("a", "good", value=[value]),)).to_json()
    assert json.loads(json.dumps(data, allow_nan=False))["leaves"][0]["value"] == [shown]
