"""What commands print, whatever the encoding of the output."""

import io
import json
import sys

from orbax_t5x.text.output import plain_lines, print_json, print_report, print_text


def test_signs_that_an_encoding_lacks_are_escaped(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    print_text("layers_{0…2}")
    stream.flush()
    assert stream.buffer.getvalue() == b"layers_{0\\u20262}\n"


def test_json_holds_values_that_json_lacks(capsys):
    print_json({"a": b"\xff", "b": {2, 1}, "c": 1 + 2j})
    assert json.loads(capsys.readouterr().out) == {"a": "\xff", "b": [1, 2], "c": "(1+2j)"}


def test_a_report_is_text_or_json(capsys):
    class Report:
        def to_json(self):
            return {"is": 1}

        def __str__(self):
            return "text"

    print_report(Report(), json=False)
    print_report(Report(), json=True)
    assert capsys.readouterr().out == 'text\n{\n "is": 1\n}\n'


def test_control_characters_stay_out_and_lines_stay():
    assert "\x1b" not in plain_lines("a\x1b[2J\nb") and len(plain_lines("a\x1b[2J\nb").splitlines()) == 2
