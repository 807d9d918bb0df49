"""The comparison of two checkouts, with tiny data."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import accelerator, data, silent
from benchmarks.regress import FIGURES, compare, figures_of

ROOT = Path(__file__).parents[2]


def _run(processor_seconds: float) -> dict[str, float]:
    rest = dict.fromkeys((key for key, *_ in FIGURES), 1.0)
    return {**rest, "processor_seconds": processor_seconds}


def test_ratios_are_those_of_the_rounds() -> None:
    rows = figures_of([_run(1), _run(2), _run(4)], [_run(2), _run(2), _run(2)])
    assert rows[0] == ["CPU s", "2.000", "2.000", "1.00", "0.75 to 1.50"]


@pytest.mark.slow
def test_a_job_runs_with_the_package_of_each_checkout(tmp_path: Path) -> None:
    job = "format_jobs", "open_ours", [str(data.many_leaves(tmp_path, 20))]
    rows = compare("opening", job, [ROOT, ROOT], 1, "0")
    assert len(rows) == 7 and all(row.startswith("| opening, huge pages off |") for row in rows)
    with pytest.raises(RuntimeError, match="not that of"):
        compare("opening", job, [tmp_path, ROOT], 1, "1")


@pytest.mark.slow
@pytest.mark.parametrize("case", silent.CASES, ids=lambda case: case.title.split()[1])
def test_others_are_silently_wrong_where_the_page_says_so(case: silent.Case) -> None:
    theirs, ours, is_as_said = silent.outcome(case)
    assert is_as_said, (theirs, ours)


@pytest.mark.slow
def test_the_accelerator_benchmark_answers_on_any_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert accelerator.main(["--mebibytes", "1", "--rounds", "1", "--folder", str(tmp_path)]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["MiB"] > 0.5 and figures["device"].startswith("8 x cpu")
    assert figures["meshes"] and all(figures["meshes"].values()) and figures["pinned_host"] == {"pinned_host": True}
    assert figures["restores"]["orbax / device_put"] > 0 and figures["stalls"]["stall, ours / stock"] > 0
    assert not list(tmp_path.iterdir())


def test_plots_are_drawn_from_numbers_of_the_tables(monkeypatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    import plots

    text = (ROOT / "benchmarks" / "README.md").read_text()
    measured = json.loads(plots.MEASURED.read_text())
    for plot in measured["plots"]:
        for bar in plot["bars"]:
            for key in ("value", "low", "high"):
                shown = (bar[key], f"{bar[key]:.2f}") if key in bar else ("", "")
                assert any(re.search(rf"(?<![\d.]){re.escape(str(form))}(?![\d])", text) for form in shown), bar
    page = (ROOT / "docs" / "project" / "benchmarks.md").read_text()
    assert measured["machine"] in page and measured["date"] in page
    drawn = plots.drawings()
    assert {path.name: path.read_text() for path in plots.PLOTS.iterdir()} == drawn, "python docs/plots.py draws them"
    assert re.findall(r"plots/([\w-]+\.svg)", page) == list(drawn)
