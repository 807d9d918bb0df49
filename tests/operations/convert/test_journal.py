"""A killed conversion is resumed: written blocks are verified and kept, and only for the same conversion.

A kill is played by an exception that nothing catches, and a work directory that is left as it is; real ones are in
`test_kill_conversions.py`.
"""

import logging

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.checkpoint_importer import LazyThreadPoolArray
from orbax_t5x.operations.convert import orbax_output as write_orbax
from orbax_t5x.operations.convert import safetensors_output as write_safetensors
from orbax_t5x.operations.convert.work_directory import WorkDirectory
from tests.support.killed_blocks import ARRAYS, Killed, assert_holds, convert, leave, work_of

FORMATS = ["orbax", "safetensors"]
TOTAL = sum(array.nbytes for array in ARRAYS.values())


def data_files(out, format):
    return list(work_of(out).glob("blocks/ocdbt.process_*/d/*" if format == "orbax" else "blocks/*.safetensors"))


def flip(path, place):
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1]))


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_several_kills_one_after_the_other(format, source, out):
    for _ in range(3):
        leave(source, out, format=format, blocks=2)
    report = convert(source, out, format=format)
    assert report.kept_bytes >= 6 * ARRAYS["leaf_0"].nbytes
    assert_holds(out, format, ARRAYS)


@pytest.mark.slow
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
        ("orbax", write_orbax, "check_merged"),
        ("orbax", write_orbax, "sync_tree"),
        ("orbax", write_orbax, "open_checkpoint"),
        ("orbax", WorkDirectory, "put_in_place"),
        ("safetensors", write_safetensors, "sync_directory"),
        ("safetensors", WorkDirectory, "put_in_place"),
    ],
)
def test_a_kill_at_the_end_costs_no_reading(format, owner, where, kills_before, source, out):
    def kill(*_, **_options):
        raise Killed

    for _ in range(kills_before):
        leave(source, out, blocks=3, format=format)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, where, kill)
        leave(source, out, blocks=None, format=format)
    report = convert(source, out, format=format, progress=lambda *_: pytest.fail("a block was written again"))
    assert report.kept_bytes == TOTAL
    assert_holds(out, format, ARRAYS)


@pytest.mark.slow
def test_a_kill_after_the_renames_leaves_the_new_one(source, out):
    convert(source, out)
    old = out.stat().st_ino
    put_in_place = WorkDirectory.put_in_place

    def kill(work, written):
        put_in_place(work, written)
        raise Killed

    def left(work, *exception):
        work._lock.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkDirectory, "put_in_place", kill)
        patch.setattr(WorkDirectory, "__exit__", left)
        with pytest.raises(Killed):
            convert(source, out, overwrite=True)
    assert out.stat().st_ino != old
    convert(source, out, overwrite=True)
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
