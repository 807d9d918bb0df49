"""Tables of text for terminals."""

import os

from orbax_t5x.text.table import TableRow, table_lines, terminal_width


def test_width_without_a_terminal(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: (_ for _ in ()).throw(OSError()))
    assert terminal_width() == 120
    monkeypatch.setenv("COLUMNS", "10")
    assert terminal_width() == 40


def test_no_line_of_names_with_parts_is_wider_than_the_terminal():
    name = "state/param_states/decoder/layers_{0,1}/encoder_decoder_attention/key/kernel/v_col ×2"
    source = "decoder/block_{000,001}/layer_001/EncDecAttention/" * 2 + "k_slot_vc"
    rows = [TableRow(name, "float32[16]", "P('data', None)", "128 B", source, "stack of 2 on axis 0")] * 3
    for width in (40, 80, 100, 200):
        lines = table_lines(rows, width, TableRow("leaf", "array", "sharding", "reads", "from"))
        assert max(map(len, lines)) <= width
        shown = "".join("".join(lines).split())
        assert shown.count("encoder_decoder_attention/key/kernel/v_col×2") == 3 and shown.count("k_slot_vc") == 3


def test_a_name_that_cannot_be_broken_stays_whole():
    lines = table_lines([TableRow("x" * 90, "int8[1]", source="y" * 90)], 80)
    assert lines[0].startswith("x" * 90) and any("y" * 90 in line for line in lines)
