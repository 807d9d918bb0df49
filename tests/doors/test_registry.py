"""Tables that the package, entry points and callers fill by name."""

import importlib.metadata
import sys

import pytest

from orbax_t5x.registry import Registry

OWN = {"square": "math:sqrt", "missing": "math:no_such_name"}


def test_own_entries_load_on_use():
    table = Registry[object]("function", OWN)
    assert table.names() == ("square", "missing")
    assert table.get("square")(9.0) == 3.0
    with pytest.raises(AttributeError, match="no_such_name"):
        table.get("missing")
    with pytest.raises(KeyError):
        table.get("cube")


def test_a_registered_entry_ends_with_its_block():
    table = Registry[str]("word", {})
    with table.register("a", "one") as held:
        assert table.get("a") == "one" and table.names() == ("a",)
        with pytest.raises(ValueError, match="a word named 'a' is registered already"):
            table.register("a", "two")
    held.unregister()
    assert table.names() == ()


def test_an_old_registration_removes_no_newer_one():
    table = Registry[str]("word", {})
    old = table.register("a", "one")
    old.unregister()
    table.register("a", "one")
    old.unregister()
    assert table.get("a") == "one"


def test_entry_points_join_and_taken_names_are_left_out(tmp_path, monkeypatch):
    """As in `importlib.metadata.entry_points`, the first package of a name on the path counts."""
    packages = {
        "a/one": "[group]\nfloor = math:floor\nsquare = math:floor\n[other]\nsin = math:sin\n",
        "b/two": "[group]\nfloor = math:ceil\n",
        "c/three": "[group]\nfloor = math:floor\n",
        "d/one": "[group]\nfloor = math:trunc\n",
        "e/four": "[groups]\ncos = math:cos\n",
    }
    for place, points in packages.items():
        info = tmp_path / f"{place}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {info.name.partition('-')[0]}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(points)
    monkeypatch.setattr(sys, "path", [str(tmp_path / place) for place in "abcde"])
    standard = {(point.name, point.value) for point in importlib.metadata.entry_points(group="group")}
    assert standard == {("floor", "math:floor"), ("square", "math:floor"), ("floor", "math:ceil")}
    table = Registry[object]("function", OWN, group="group")
    with pytest.warns(UserWarning) as caught:
        assert table.names() == ("square", "missing", "floor")
    assert [str(one.message) for one in caught] == [
        "the function 'square' at math:floor is left out: the name is taken by this package's",
        "the function 'floor' at math:ceil is left out: the name is taken by math:floor",
    ]
    assert table.get("floor")(2.5) == 2
    assert table.get("square")(4.0) == 2.0
    with pytest.raises(ValueError, match="registered already"):
        table.register("floor", abs)
