"""What a release is made of agrees: versions, changelog, fragments of it, and the workflow that publishes."""

import re
import tomllib
from pathlib import Path

import orbax_t5x as ot

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_KINDS = {"added", "changed", "deprecated", "removed", "fixed", "security"}


def problems_of_fragment(name: str, text: str) -> list[str]:
    """What is wrong with the name or text of a fragment of the changelog."""
    topic, _, rest = name.partition(".")
    kind, _, suffix = rest.partition(".")
    found = [] if re.fullmatch(r"[a-z0-9-]+", topic) and suffix == "txt" else ["the name is not TOPIC.KIND.txt"]
    found += [] if kind in _KINDS else [f"{kind!r} is none of {sorted(_KINDS)}"]
    lines = text.splitlines()
    found += [] if text.startswith("- ") and text.endswith("\n") else ["it is not one list item in whole lines"]
    found += [] if all(line.startswith("  ") for line in lines[1:]) else ["further lines begin with two spaces"]
    return found + [f"a line of {len(line)} characters" for line in lines if len(line) > 140]


def test_fragments_of_the_changelog_have_their_form():
    fragments = [path for path in (ROOT / "docs" / "changes").iterdir() if path.name != "README.txt"]
    found = {path.name: problems_of_fragment(path.name, path.read_text()) for path in fragments}
    assert not {name: problems for name, problems in found.items() if problems}


def test_a_fragment_of_another_form_is_a_problem():
    good = "- **`ot.new`** does\n  this.\n"
    assert not problems_of_fragment("new.added.txt", good)
    for name, text in {
        "new.added.md": good,
        "new.txt": good,
        "New thing.added.txt": good,
        "new.improved.txt": good,
        "a.fixed.txt": "one sentence\n",
        "b.fixed.txt": "- one\n- two\n",
        "c.fixed.txt": "- one",
        "d.fixed.txt": f"- {'x' * 140}\n",
    }.items():
        assert problems_of_fragment(name, text), name


def test_one_version_everywhere():
    release = re.search(
        r"^## (\d+\.\d+\.\d+) \((\d{4}-\d\d-\d\d)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    citation = dict(re.findall(r"^([\w-]+): (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE))
    assert release and ot.__version__ == PROJECT["version"] == release[1] == citation["version"]
    assert citation["date-released"] == release[2] and citation["license"] == PROJECT["license"]


def test_the_addresses_are_those_of_the_metadata():
    """`[project.urls]` is the one place that decides; README, citation and notebooks repeat it."""
    urls = PROJECT["urls"]
    citation = (ROOT / "CITATION.cff").read_text()
    assert f'repository-code: "{urls["Source"]}"' in citation and f'\nurl: "{urls["Documentation"]}"' in citation
    assert all(url.startswith(urls["Source"]) for name, url in urls.items() if name != "Documentation")
    own = re.compile(r"https://(?:colab\.research\.google\.com/)?[\w./-]*orbax-t5x[\w./-]*")
    colab = urls["Source"].replace("https://github.com", "https://colab.research.google.com/github")
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.ipynb")]
    links = [(path, link) for path in files for link in own.findall(path.read_text())]
    assert len(links) > 15
    wrong = [found for found in links if not found[1].startswith((urls["Source"], urls["Documentation"], colab))]
    assert not wrong, f"addresses that pyproject.toml does not name: {wrong}"


def test_the_workflows_run_every_python_that_the_metadata_name():
    pythons = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    for workflow in ("check.yml", "release.yml"):
        text = (ROOT / ".github" / "workflows" / workflow).read_text()
        assert re.search(r"python: \[(.*)\]", text)[1] == ", ".join(f'"{version}"' for version in pythons), workflow


def test_only_the_job_that_publishes_may_sign():
    """Whoever may write an identity token may publish: no other job has that permission."""
    jobs = re.split(r"^  (\w+):\n", (ROOT / ".github" / "workflows" / "release.yml").read_text(), flags=re.MULTILINE)
    signing = [name for name, text in zip(jobs[1::2], jobs[2::2], strict=True) if "id-token: write" in text]
    assert signing == ["attest", "publish"] and "password" not in "".join(jobs)
