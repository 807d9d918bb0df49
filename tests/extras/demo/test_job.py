"""The demo does what it says, and says so when something differs."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from orbax_t5x.cli.main import main
from orbax_t5x.extras.demo import job


@pytest.mark.slow
def test_the_demo(tmp_path, capfd):
    kept = tmp_path / "kept"
    assert main(["demo", "--keep", str(kept)]) == 0
    out = capfd.readouterr().out
    assert out.count("ok  261 of 261 leaves equal") == 3 and "NOT" not in out
    assert "8 CPU devices" in out and re.search(r"All the same, bit for bit\. \d+\.\d s\.", out)
    assert max(map(len, out.splitlines()[:-1])) <= 80
    assert (kept / "run" / "1000000").is_dir()


def test_the_demo_does_not_write_where_something_is(tmp_path, capsys):
    assert main(["demo", "--keep", str(tmp_path)]) == 2
    assert "File exists" in capsys.readouterr().err


@pytest.fixture
def t5x_arrays(goldens):
    """What T5X itself made of the demo's bundle."""
    with np.load(goldens / "importer" / "t5_1_1_f32.npz") as values:
        return dict(values)


def test_the_demo_expects_what_t5x_made_of_the_same_bundle(goldens, t5x_arrays):
    for path in (goldens / "tf_bundle" / "t5_1_1_f32").glob("model.ckpt*"):
        assert (job._DATA / path.name).read_bytes() == path.read_bytes()
    digests = job._digests(t5x_arrays)
    lines = [f"{digests[name]} {name}\n" for name in sorted(digests)]
    assert (job._DATA / "as_t5x_imports_it.txt").read_text() == "".join(lines)


@pytest.fixture
def other_values(tmp_path, monkeypatch, t5x_arrays):
    """The demo's data, with one bit of one expected value changed."""
    data = tmp_path / "data"
    shutil.copytree(Path(job.__file__).parents[2] / "cli" / "demo_data", data)
    expected = data / "as_t5x_imports_it.txt"
    digests = job._digests(t5x_arrays)
    name = "target/encoder/encoder_norm/scale"
    t5x_arrays[name].view(np.uint32)[3] ^= 1
    changed = expected.read_text().replace(digests[name], job._digests(t5x_arrays)[name])
    assert changed != expected.read_text()
    expected.write_text(changed)
    monkeypatch.setattr(job, "_DATA", data)


@pytest.mark.slow
def test_one_bit_makes_it_fail(tmp_path, other_values, capsys, monkeypatch):
    (tmp_path / "work").mkdir()
    for later in ("save_and_resume", "read_with_stock_orbax"):
        monkeypatch.setattr(job._DemoJob, later, lambda self: None)
    assert job.main(str(tmp_path / "work"), "") == 1
    out = capsys.readouterr().out
    assert "NOT 260 of 261 leaves equal what T5X's own importer makes of it" in out
    assert "different: target/encoder/encoder_norm/scale" in out and "NOT ALL THE SAME" in out
