"""`compare-logits`: exit codes, text and JSON."""

import json

import pytest

from orbax_t5x.cli.main import main
from orbax_t5x.extras.demo import compare_logits_command
from orbax_t5x.extras.demo.compare_logits import LogitsReport
from tests.conftest import GOLDENS

BUNDLE = GOLDENS / "tf_bundle" / "t5_1_1_f32"


@pytest.fixture
def reported(monkeypatch):
    """What the command gives to the comparison; the comparison itself is tested in `tests/operations`."""
    given = {}

    def compare(a, b, **options):
        given.update(options, formats=(a.format, b.format))
        return LogitsReport("a", "b", (3, 4, 5), 0.25, 2.0, 7, is_close=options["atol"] > 0.1)

    monkeypatch.setattr(compare_logits_command, "compare_logits", compare)
    return given


def run(capsys, *arguments):
    code = main(["compare-logits", str(BUNDLE), str(GOLDENS / "safetensors" / "t5_1_1"), *arguments])
    return code, capsys.readouterr().out


def test_exit_codes_text_and_json(reported, capsys):
    code, out = run(capsys)
    assert code == 1 and "maximal difference 0.25, relative to the largest logit 0.125" in out
    assert "the same at 7 of 12 positions" in out
    code, out = run(capsys, "--atol", "0.5", "--sequences", "3", "--length", "4", "--seed", "9", "--json")
    assert code == 0 and json.loads(out)["max_rel"] == 0.125
    assert reported == {
        **{"sequences": 3, "length": 4, "seed": 9, "atol": 0.5, "rtol": 1e-4},
        "formats": ("tf_bundle", "safetensors"),
    }


def test_counts_are_whole_numbers_from_1_on(capsys):
    assert main(["compare-logits", "a", "b", "--length", "0"]) == 2
    assert "'0' is no number from 1 on" in capsys.readouterr().err
