"""Public names load their modules on first use, and only then."""

import signal
import sys
import threading
from types import ModuleType

import pytest

from orbax_t5x import on_demand, rules, transforms


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with a module, and a name of it that the package hands on."""
    folder = tmp_path / "of_two"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "first.py").write_text("value = object()\n\ndef join(*texts, by): return by.join(texts)\n")
    monkeypatch.syspath_prepend(tmp_path)
    package = __import__("of_two")
    modules = {"value": "of_two.first", "first": "", "tool": "json"}
    for name, value in zip(("__all__", "__getattr__", "__dir__"), on_demand.public("of_two", modules), strict=True):
        monkeypatch.setattr(package, name, value, raising=False)
    yield package
    for name in ("of_two", "of_two.first"):
        sys.modules.pop(name, None)


def test_a_name_loads_its_module_once(package):
    assert "of_two.first" not in sys.modules
    value = package.value
    assert value is sys.modules["of_two.first"].value and vars(package)["value"] is value


def test_modules_are_names_too(package):
    assert isinstance(package.first, ModuleType) and isinstance(package.tool, ModuleType)


def test_other_names_are_no_attributes(package):
    with pytest.raises(AttributeError, match="module 'of_two' has no attribute 'third'"):
        _ = package.third
    assert not hasattr(package, "join")


def test_a_function_loads_its_module_when_it_is_called(package):
    join = on_demand.function("of_two.first", "join")
    assert "of_two.first" not in sys.modules
    assert join("a", "b", by="-") == "a-b"


@pytest.mark.parametrize("package", [rules, transforms])
def test_packages_list_names_that_are_not_loaded_yet(package, monkeypatch):
    for name in package.__all__:
        monkeypatch.delitem(vars(package), name, raising=False)
    assert set(dir(package)) == {*package.__all__, "__all__", "__doc__", "__file__", "__name__"}


def test_an_interrupt_ends_the_wait_and_not_the_import(tmp_path, monkeypatch):
    """A module that is left halfway begins again, and what it has imported is not what it was."""
    (tmp_path / "interrupted_while_imported.py").write_text(
        "import os, signal, sys\n"
        "sys.begun.append(1)\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\n"
        "sys.go_on.wait(60)\n"
        "def value(): return len(sys.begun)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "begun", [], raising=False)
    monkeypatch.setattr(sys, "go_on", threading.Event(), raising=False)

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    value = on_demand.function("interrupted_while_imported", "value")
    try:
        with pytest.raises(KeyboardInterrupt):
            value()
        sys.go_on.set()
        assert value() == 1
    finally:
        signal.signal(signal.SIGUSR1, before)
        sys.modules.pop("interrupted_while_imported", None)
