"""What leaves a guarded call: our errors, what we raise on purpose and what users raise as it is, all else typed."""

import asyncio
import json
import signal
import sysconfig
import threading
import warnings

import numpy as np
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.concurrency import guarded
from orbax_t5x.concurrency.carried import call_carried, call_of_user
from orbax_t5x.errors import (
    CheckpointIOError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LimitExceededError,
    UnsupportedCheckpointError,
)
from orbax_t5x.readers.ranges.leaf import ByteRangeLeaf


def compiled(body, module, file):
    """A guarded function `path -> None` as if a module of this name and file had it."""
    scope = {"__name__": module, "__file__": file, "np": np, "json": json}
    exec(f"def function(path, *arguments):\n    {body}", scope)
    return guarded(scope["function"])


def ours(body):
    """Code of a reader: a file decides what it meets."""
    return compiled(body, "orbax_t5x.readers.fake", ot.__file__)


def planning(body):
    """Code that no file's bytes reach."""
    return compiled(body, "orbax_t5x.restoring.fake", ot.__file__)


def library(body):
    return compiled(body, "numpy.fake", np.__file__)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("raise ValueError('text')", UnsupportedCheckpointError),
        ("raise KeyError('text')", UnsupportedCheckpointError),
        ("raise Exception('text')", UnsupportedCheckpointError),
        ("raise RecursionError('text')", UnsupportedCheckpointError),
        ("json.loads('{')", UnsupportedCheckpointError),
        ("raise MemoryError('text')", LimitExceededError),
        ("raise OSError(5, 'text')", CheckpointIOError),
        ("raise FileNotFoundError(2, 'text')", CheckpointNotFoundError),
    ],
)
def test_errors_of_libraries_are_typed_with_their_cause(body, kind):
    with pytest.raises(kind, match="place") as caught:
        library(body)("place")
    assert caught.value.path == "place"
    assert caught.value.__cause__ is not None
    if kind is CheckpointIOError:
        assert caught.value.errno == 5


@pytest.mark.parametrize(
    "body", ["(10**30).to_bytes(8)", "None + 1", "np.dtype('nothing')", "np.zeros(2)[5]", "{}['a']", "assert False"]
)
def test_mistakes_of_ours_are_typed(body):
    with pytest.raises(UnsupportedCheckpointError, match="not foreseen"):
        ours(body)("place")


@pytest.mark.parametrize("kind", [TypeError, ValueError, IndexError, KeyError, NotImplementedError])
def test_what_this_package_says_of_arguments_is_meant(kind):
    marked = f"from orbax_t5x.errors import for_caller; raise for_caller({kind.__name__}('text'))"
    for function in (planning(f"raise {kind.__name__}('text')"), ours(marked)):
        with pytest.raises(kind, match=r"^'?text'?$") as caught:
            function("place")
        assert type(caught.value) is kind
    with pytest.raises(UnsupportedCheckpointError, match="not foreseen"):
        ours(f"raise {kind.__name__}('text')")("place")


@pytest.mark.parametrize("body", ["json.loads('{')", "(lambda f: f(f))(lambda f: f(f))", "2.0 ** 5000"])
def test_outside_the_readers_too_all_that_is_no_misuse_is_typed(body):
    with pytest.raises(UnsupportedCheckpointError, match="not foreseen"):
        planning(body)("place")


def test_arguments_that_a_function_does_not_have_are_a_type_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'transform'"):
        ot.restore("place", {}, transform=[])
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        planning("pass")()
    with pytest.raises(UnsupportedCheckpointError, match="not foreseen"):
        ours("len(1, 2)")("place")


def test_our_errors_are_the_same_objects():
    error = CorruptCheckpointError("text", path="elsewhere")
    with pytest.raises(CorruptCheckpointError) as caught:
        ours("raise arguments[0]")("place", error)
    assert caught.value is error


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError])
def test_what_is_no_exception_passes(kind):
    with pytest.raises(kind):
        library(f"import asyncio; raise {'asyncio.' if kind is asyncio.CancelledError else ''}{kind.__name__}")("place")


class Stopped(Exception):
    pass


def user(*_):
    raise Stopped("by the user")


@pytest.mark.parametrize("call", [call_carried, call_of_user])
def test_what_users_raise_passes_wherever_it_is_called(call):
    for called in (
        ours("arguments[0](arguments[1])"),
        library("sorted([2, 1], key=lambda _: arguments[0](arguments[1]))"),
    ):
        with pytest.raises(Stopped):
            called("place", call, user)
    with pytest.raises(json.JSONDecodeError):  # raised by a library on behalf of the user's function
        ours("arguments[0](arguments[1], '{')")("place", call, json.loads)


@pytest.mark.parametrize("directory", ["/home/user", sysconfig.get_path("purelib")])
def test_callbacks_of_a_restore_pass_wherever_they_are_installed(tmp_path, directory):
    """The oracle is Python: the exception that leaves is the object that was raised."""
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"w": np.zeros(3, np.float32)}, path)
    raised = KeyError("of the user")
    scope = {"__name__": "company.callbacks", "__file__": f"{directory}/company/callbacks.py", "raised": raised}
    exec(compile("def progress(*_):\n    raise raised", scope["__file__"], "exec"), scope)
    target = {"w": np.zeros(3, np.float32)}
    for call in (
        lambda: ot.restore(path, target, progress=scope["progress"]),
        lambda: ot.verify(path, progress=scope["progress"]),
        lambda: ot.convert(path, tmp_path / "converted", progress=scope["progress"]),
    ):
        with pytest.raises(KeyError) as caught:
            call()
        assert caught.value is raised


def test_a_signal_handler_may_raise_anywhere():
    before = signal.signal(signal.SIGUSR1, user)
    try:
        with pytest.raises(Stopped):
            library("import signal; signal.raise_signal(signal.SIGUSR1); return sum(range(1000))")("place")
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_warnings_that_are_errors_pass():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning):
            ours("import warnings; warnings.warn('text')")("place")


def test_coroutines():
    scope = {"__name__": "numpy.fake", "__file__": np.__file__}
    exec("async def function(path):\n    {}['a']", scope)
    with pytest.raises(UnsupportedCheckpointError, match=r"^place: .*KeyError: 'a'"):
        asyncio.run(guarded(scope["function"])("place"))


def test_the_path_is_that_of_an_object_or_follows_self(tmp_path):
    class Opened:
        path = "opened"

    for arguments, path in (((Opened(),), "opened"), ((None, tmp_path), str(tmp_path)), ((3,), None)):
        with pytest.raises(UnsupportedCheckpointError) as caught:
            library("{}['a']")(*arguments)
        assert caught.value.path == path


def test_a_leaf_and_a_plan_name_what_they_are_about(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"w": np.zeros(3, np.float32)}, path)
    plan = ot.plan_restore(path, {"w": np.zeros(3, np.float32)})
    with ot.open_checkpoint(path) as checkpoint:
        monkeypatch.setattr(ByteRangeLeaf, "read_into", library("{}['a']").__wrapped__)
        monkeypatch.setattr(ByteRangeLeaf, "read_blocking", library("{}['a']").__wrapped__)
        with pytest.raises(UnsupportedCheckpointError, match="not foreseen") as caught:
            checkpoint.leaves["w"].get()
        assert (caught.value.path, caught.value.leaf) == (str(path), "w")
    with pytest.raises(UnsupportedCheckpointError, match="not foreseen") as caught:
        plan.execute()
    assert str(tmp_path) in str(caught.value.path)


def test_an_error_of_a_lock_that_an_interrupt_broke_is_the_interrupt():
    lock = threading.Lock()

    @guarded
    def call():
        with lock:
            lock.release()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call()
