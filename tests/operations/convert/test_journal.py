"""A killed conversion is resumed: written blocks are verified and kept, and only for the same conversion.

A kill is played by an exception that nothing catches, and a work directory that is left as it is; real ones are in
`test_kill_conversions.py`.
"""

import logging
import os

import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
import tensorstore as ts

import orbax_t5x as ot
from orbax_t5x.checkpoint_importer import LazyThreadPoolArray
from orbax_t5x.operations.convert import orbax_output as write_orbax
from orbax_t5x.operations.convert import safetensors_output as write_safetensors
from orbax_t5x.operations.convert.work_directory import WorkDirectory
from tests.support.bundle_writer import bundle_of

MIB = 1 << 20
FORMATS = ["orbax", "safetensors"]
RNG = np.random.default_rng(0)
ARRAYS = {f"leaf_{index}": RNG.standard_normal((64, 1024), np.float32) for index in range(12)}
TOTAL = sum(array.nbytes for array in ARRAYS.values())


class Killed(BaseException):
    """Stands for a kill."""


@pytest.fixture
def source(tmp_path):
    (tmp_path / "source").mkdir()
    return bundle_of(ARRAYS).write(tmp_path / "source")


@pytest.fixture
def out(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "c"


def work_of(out):
    return out.parent / f".{out.name}.orbax-t5x-convert"


def convert(source, out, transforms=(), *, format="orbax", limit=4 * MIB, **keywords):
    return ot.convert(source, out, transforms, format=format, memory_limit_bytes=limit, **keywords)


def leave(source, out, *arguments, blocks=5, **keywords):
    """A conversion that is killed when so many blocks stand, or by what the test has patched."""
    seen = []

    def progress(*told):
        seen.append(told)
        if len(seen) == blocks:
            raise Killed

    def left(work, *exception):
        os.close(work._lock)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkDirectory, "__exit__", left)
        with pytest.raises(Killed):
            convert(source, out, *arguments, progress=progress, **keywords)
    assert work_of(out).exists() and not out.exists()


def read(out, format):
    if format == "orbax":
        return ocp.PyTreeCheckpointer().restore(out)
    return safetensors.numpy.load_file(out / "model.safetensors")


def read_by_tensorstore(out):
    for name in ARRAYS:
        kvstore = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{out}/"}, "path": f"{name}/"}
        ts.open({"driver": "zarr", "kvstore": kvstore}, context=ts.Context()).result().read().result()


def assert_holds(out, format, arrays):
    found = read(out, format)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def data_files(out, format):
    return list(work_of(out).glob("blocks/ocdbt.process_*/d/*" if format == "orbax" else "blocks/*.safetensors"))


def flip(path, place):
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("format", FORMATS)
def test_what_stands_is_kept_and_the_rest_is_read(format, source, out, caplog):
    caplog.set_level(logging.INFO, "orbax_t5x")
    leave(source, out, format=format)
    told = []
    report = convert(source, out, format=format, progress=lambda *one: told.append(one))
    assert 0 < report.kept_bytes < TOTAL and report.bytes == TOTAL
    assert told[-1][:2] == (TOTAL - report.kept_bytes,) * 2
    assert "written already" in str(report)
    assert any("resumes a killed conversion" in record.getMessage() for record in caplog.records)
    assert_holds(out, format, ARRAYS)
    assert ot.verify(out).status == ("ok" if format == "orbax" else "no checksum")


@pytest.mark.parametrize("format", FORMATS)
def test_several_kills_one_after_the_other(format, source, out):
    for _ in range(3):
        leave(source, out, format=format, blocks=2)
    report = convert(source, out, format=format)
    assert report.kept_bytes >= 6 * ARRAYS["leaf_0"].nbytes
    assert_holds(out, format, ARRAYS)


@pytest.mark.parametrize("format", FORMATS)
def test_damaged_blocks_are_written_again(format, source, out):
    leave(source, out, format=format, blocks=10)
    for path in data_files(out, format):
        for place in range(path.stat().st_size // 2, path.stat().st_size, path.stat().st_size // 7 + 1):
            flip(path, place)
    report = convert(source, out, format=format)
    assert report.kept_bytes < 10 * ARRAYS["leaf_0"].nbytes
    assert_holds(out, format, ARRAYS)


@pytest.mark.parametrize("format", FORMATS)
def test_vanished_files_are_written_again(format, source, out):
    leave(source, out, format=format)
    for path in data_files(out, format):
        path.unlink()
    assert convert(source, out, format=format).kept_bytes == 0
    assert_holds(out, format, ARRAYS)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: data + b"0000",
        lambda data: data + data.splitlines()[-1] + b"\n",
        lambda data: b"x" + data,
        lambda data: data.replace(b"[1,", b"[2,"),
    ],
)
def test_a_damaged_journal_counts_up_to_its_first_torn_line(damage, source, out):
    leave(source, out)
    (journal,) = work_of(out).glob("journal.*")
    journal.write_bytes(damage(journal.read_bytes()))
    convert(source, out)
    assert_holds(out, "orbax", ARRAYS)


@pytest.mark.parametrize("begun", [b"", b"0123"])
def test_a_kill_while_a_journal_is_begun_costs_nothing(begun, source, out):
    leave(source, out)
    (work_of(out) / "journal.2").write_bytes(begun)
    assert convert(source, out).kept_bytes >= 5 * ARRAYS["leaf_0"].nbytes
    assert_holds(out, "orbax", ARRAYS)


@pytest.mark.parametrize("kills_before", [0, 2])
@pytest.mark.parametrize(
    ("format", "owner", "where"),
    [
        ("orbax", write_orbax, "merge_parts"),
        ("orbax", write_orbax, "sync_tree"),
        ("orbax", write_orbax, "open_checkpoint"),
        ("orbax", WorkDirectory, "put_in_place"),
        ("safetensors", write_safetensors, "sync_directory"),
        ("safetensors", WorkDirectory, "put_in_place"),
    ],
)
def test_a_kill_at_the_end_costs_no_reading(format, owner, where, kills_before, source, out):
    def kill(*_):
        raise Killed

    for _ in range(kills_before):
        leave(source, out, blocks=3, format=format)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, where, kill)
        leave(source, out, blocks=None, format=format)
    report = convert(source, out, format=format, progress=lambda *_: pytest.fail("a block was written again"))
    assert report.kept_bytes == TOTAL
    assert_holds(out, format, ARRAYS)


def test_a_kill_after_the_exchange_of_names_leaves_the_new_one(source, out):
    convert(source, out)
    old = out.stat().st_ino
    put_in_place = WorkDirectory.put_in_place

    def kill(work, written):
        put_in_place(work, written)
        raise Killed

    def left(work, *exception):
        os.close(work._lock)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkDirectory, "put_in_place", kill)
        patch.setattr(WorkDirectory, "__exit__", left)
        with pytest.raises(Killed):
            convert(source, out, overwrite=True)
    assert out.stat().st_ino != old
    convert(source, out, overwrite=True)
    assert_holds(out, "orbax", ARRAYS)


def test_no_file_of_a_kill_stays_in_the_item(source, out):
    """What nobody refers to is no larger than the nodes of a database; values and locks of killed writers are gone."""
    for _ in range(3):
        leave(source, out, blocks=3)
    convert(source, out)
    assert not list(out.rglob("*.__lock"))
    files = list(out.rglob("d/*"))
    is_needed = []
    for path in files:
        away = path.rename(out.parent / "away")
        try:
            read_by_tensorstore(out)
            is_needed.append(False)
        except ValueError:
            is_needed.append(True)
        away.rename(path)
    values = [path for path, needed in zip(files, is_needed, strict=True) if needed]
    assert sum(path.stat().st_size for path in values) >= TOTAL * 0.9
    for path in set(files) - set(values):
        assert path.stat().st_size < 1024, path
    assert_holds(out, "orbax", ARRAYS)


# -- only the same conversion


@pytest.mark.parametrize("format", FORMATS)
def test_of_another_source_nothing_is_kept(format, source, out, caplog):
    caplog.set_level(logging.INFO, "orbax_t5x")
    leave(source, out, format=format)
    changed = ARRAYS | {"leaf_3": np.zeros((64, 1024), np.float32)}
    bundle_of(changed).write(source.parent)
    assert convert(source, out, format=format).kept_bytes == 0
    assert any("begins anew" in record.getMessage() for record in caplog.records)
    assert_holds(out, format, changed)


def test_of_other_transforms_nothing_is_kept_and_of_equal_ones_all(source, out):
    def first(state, target):
        return {name: view[::-1] for name, view in state.items()}

    leave(source, out, lambda state, target: {name: view[::-2] for name, view in state.items()})
    leave(source, out, first)
    report = convert(source, out, lambda state, target: {name: view[::-1] for name, view in state.items()})
    assert 0 < report.kept_bytes < TOTAL
    assert_holds(out, "orbax", {name: array[::-1] for name, array in ARRAYS.items()})


def test_constants_count_by_their_contents(source, out):
    def adding(value):
        constant = np.full((1, 1024), value, np.float32)
        return lambda state, target: {name: ot.concatenate([view, constant], 0) for name, view in state.items()}

    leave(source, out, adding(1))
    assert convert(source, out, adding(2)).kept_bytes == 0
    expected = {name: np.concatenate([array, np.full((1, 1024), 2, np.float32)]) for name, array in ARRAYS.items()}
    assert_holds(out, "orbax", expected)


def test_another_format_begins_anew(source, out):
    leave(source, out)
    assert convert(source, out, format="safetensors").kept_bytes == 0
    assert_holds(out, "safetensors", ARRAYS)


def test_another_memory_limit_goes_on_where_the_chunks_are_the_same(source, out):
    leave(source, out, limit=4 * MIB)
    assert convert(source, out, limit=8 * MIB).kept_bytes > 0
    assert_holds(out, "orbax", ARRAYS)


def test_what_a_function_computes_is_computed_again(source, out):
    def lazy(state, target):
        return {**state, "made": LazyThreadPoolArray((3,), np.float32, lambda: np.ones(3, np.float32))}

    leave(source, out, lazy)
    assert convert(source, out, lazy).kept_bytes == 0
    assert_holds(out, "orbax", ARRAYS | {"made": np.ones(3, np.float32)})


def test_an_error_leaves_nothing_that_could_be_gone_on_with(source, out):
    leave(source, out)

    def fail(*_):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        convert(source, out, progress=fail)
    assert not list(out.parent.iterdir())
