"""The site has an entry for every public name, its workflow files parse, and what checks a built site finds faults."""

import re
from pathlib import Path

import pytest
import yaml

import orbax_t5x as ot

ROOT = Path(__file__).parents[2]
_MODULES = ("transforms", "rules", "errors", "args", "v1", "nnx")
# T5X's modules, whose names are listed by `automodule`.
_WHOLE = ("state_utils", "checkpoint_importer", "train_state", "optimizers", "adafactor")


def test_every_public_name_has_one_entry():
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    entries = re.findall(r"^\.\. auto(?:function|class|data|module):: orbax_t5x\.([\w.]+)$", pages, re.MULTILINE)
    assert len(entries) == len(set(entries))
    wanted = {name for name in ot.__all__ if name not in _MODULES}
    for module in _MODULES:
        public = getattr(getattr(ot, module), "__all__", None) or [
            name for name in vars(getattr(ot, module)) if name.startswith("TrainState") or name.endswith("Error")
        ]
        wanted |= {f"{module}.{name}" for name in public}
    wanted -= {"errors.RestorePlanError"}  # ot.RestorePlanError
    assert wanted - set(entries) == set()
    for module in _WHOLE:
        assert re.search(rf"automodule:: orbax_t5x\.{module}\n   :members:\n   :undoc-members:", pages)


@pytest.mark.parametrize("path", [ROOT / ".readthedocs.yaml", *(ROOT / ".github" / "workflows").glob("*.yml")], ids=str)
def test_workflows_parse(path):
    found = yaml.safe_load(path.read_text())
    if path.parent == ROOT:
        assert (ROOT / found["sphinx"]["configuration"]).exists() and found["sphinx"]["fail_on_warning"]
        return
    # YAML 1.1 reads `on` as true.
    assert {"name", True, "jobs"} <= set(found) and "permissions" in found
    makefile = (ROOT / "Makefile").read_text()
    for job in found["jobs"].values():
        for step in job["steps"]:
            assert step.keys() & {"uses", "run"}
            for target in re.findall(r"make ([\w-]+)", step.get("run", "")):
                assert re.search(rf"^{target}:", makefile, re.MULTILINE)


PAGE = (
    '<html lang="en"><head><title>x</title></head><body><section id="a"><h1>x</h1><h2>y</h2>{}</section></body></html>'
)


def test_faults_of_a_built_site_are_found(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    from check_site import problems

    (tmp_path / "_static").mkdir()
    theme = 'html[data-theme="light"] .highlight'
    style = f"{theme} {{{{ background: #ffffff }}}}\n{theme} .k {{{{ color: {{}} }}}}"
    (tmp_path / "_static" / "pygments.css").write_text(style.format("#333333"))
    (tmp_path / "other.html").write_text(PAGE.format(""))
    for body, fault in [
        ('<a href="other.html#a">x</a><a href="https://example.org">x</a>', ""),
        ('<a href="none.html">x</a>', "a link to nothing"),
        ('<a href="other.html#b">x</a>', "an anchor that is not there"),
        ("<h4>x</h4>", "a heading of level 4 after one of level 2"),
        ("<h1>x</h1>", "2 first headings"),
        ('<img src="_static/pygments.css">', "a picture without a text"),
        ('<img alt="x" src="none.svg">', "loaded, and not there"),
        ('<script src="https://example.org/x.js"></script>', "loaded from elsewhere"),
        ('<svg role="img"></svg>', "a drawing without a label"),
        ('<p id="b"></p><p id="b"></p>', "an anchor that is there twice: b"),
        ('<a href="other.html"> </a>', "a link without a text"),
        ('<a href="other.html"><img alt="x" src="other.html"></a>', ""),
        ("<table><thead><tr><th></th><th>x</th></tr></thead></table>", "a column without a heading"),
        ("<table><thead><tr><th></th><th></th></tr></thead></table>", ""),
    ]:
        (tmp_path / "page.html").write_text(PAGE.format(body))
        found = list(problems(tmp_path))
        assert len(found) == bool(fault) and all(fault in problem for problem in found), (body, found)
    (tmp_path / "page.html").write_text("<h1>x</h1>" + "x" * (4 << 20))
    assert [problem.partition(": ")[2] for problem in problems(tmp_path)] == [
        "4.0 MiB with all that it loads",
        "no title",
    ]
    (tmp_path / "page.html").write_text(PAGE.format(""))
    (tmp_path / "_static" / "pygments.css").write_text(style.format("#bbbbbb"))
    assert list(problems(tmp_path)) == ["light .highlight .k: #bbbbbb on #ffffff"]
    (tmp_path / "_static" / "site.css").write_text("p:first-child { color: var(--pst-color-text-base); width: 1rem }")
    assert len(list(problems(tmp_path))) == 1
    (tmp_path / "_static" / "site.css").write_text("p { border: 1px solid #777777 } th { color: rgb(1, 2, 3); }")
    assert [problem.partition("its own: ")[2] for problem in problems(tmp_path)][:2] == [
        "border: 1px solid #777777 ",
        "color: rgb(1, 2, 3)",
    ]


def test_every_cell_of_the_table_of_jobs_leads_to_its_job():
    page = ROOT / "docs" / "have-want.md"
    rows = [line.strip("| ").split(" | ") for line in page.read_text().splitlines() if line.startswith("| **")]
    assert len(rows) >= 8
    for have, *cells in rows:
        assert len(cells) == 5, have
        for cell in cells:
            targets = re.findall(r"\]\(([^)]+)\)", cell)
            assert targets, (have, cell)
            # A recipe, or a section: the head of a guide does none of these jobs by itself.
            assert all(target.startswith("examples/") or "#" in target for target in targets), (have, cell)
            assert all((page.parent / target.partition("#")[0]).exists() for target in targets), (have, cell)


@pytest.mark.parametrize(
    ("word", "page"),
    [
        ("HuggingFace", "coming-from/transformers.md"),
        ("Hugging Face", "coming-from/transformers.md"),
        ("lossy cast", "guides/restoring.md"),
        ("fallback_for", "guides/missing-and-leftover.md"),
        ("strict", "guides/missing-and-leftover.md"),
    ],
)
def test_words_that_readers_search_for_lead_to_their_page(word, page):
    """A main entry of the index (`!`) comes before all pages that only have the word."""
    entries = re.findall(r"^```\{index\} (.+)$", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    assert f"! {word}" in [entry.strip() for line in entries for entry in line.split(",")]


def test_snippets_of_a_search_are_of_the_text_of_a_page():
    script = (ROOT / "docs" / "_static" / "search.js").read_text()
    assert (
        'querySelector("article")' in script and 'html_js_files = ["search.js"]' in (ROOT / "docs/conf.py").read_text()
    )
