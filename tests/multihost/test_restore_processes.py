"""Several real processes, two devices each: each reads only what its own shards need, and together they verify it."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot
from tests.conftest import GOLDENS
from tests.support.jax_job import run_job

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bundle():
    return GOLDENS / "tf_bundle" / "t5_1_1_f32"


@pytest.fixture(scope="module")
def whole(bundle):
    return ot.state_utils.flatten_state_dict(ot.restore(bundle, None))


@pytest.fixture(scope="module")
def matrices(bundle):
    """Names of some matrices."""
    with ot.open_checkpoint(bundle) as opened:
        names = [name for name, leaf in opened.leaves.items() if name.endswith("/kernel") and len(leaf.shape) == 2][:5]
    assert len(names) == 5
    return names


def damaged(bundle, directory, name, at):
    """A copy of the bundle with a flipped bit in a byte of a file."""
    shutil.copytree(bundle, directory)
    data = bytearray((directory / name).read_bytes())
    data[at] ^= 1
    (directory / name).write_bytes(data)
    return directory


@pytest.fixture(scope="module")
def told(bundle, matrices, tmp_path_factory):
    """What two processes tell of all that they restore in turn; starting them takes longest."""
    folder = tmp_path_factory.mktemp("told")
    with ocp.Checkpointer(ot.TrainStateHandler()) as checkpointer:
        checkpointer.save(folder / "orbax", args=ot.args.TrainStateSave(ot.restore(bundle, None)))
    with ot.open_checkpoint(bundle) as opened:
        ends = opened.leaves[matrices[3]].leaf.range
        rows, _ = opened.leaves["shared/embedding"].shape
    shard = max(bundle.glob("*.data-*"), key=lambda path: path.stat().st_size)
    rest = damaged(bundle, folder / "rest", Path(ends.file.path).name, ends.offset + ends.nbytes - 1)
    cases = {
        "rows": ("restore", bundle, "rows"),
        "grown": ("grow", bundle, rows + rows // 4),
        "damaged": ("restore", damaged(bundle, folder / "damaged", shard.name, 100), "rows"),
        "bundle": ("restore_first_rows", bundle, *matrices),
        "orbax": ("restore_first_rows", folder / "orbax", *matrices),
        "rest": ("restore_first_rows", rest, *matrices),
        "one fails": ("restore_where_one_fails", bundle),
        "saved": ("save_and_restore", bundle, folder / "root"),
    }
    results = run_job(2, "in_turn", json.dumps(cases, default=str))
    return {"root": folder / "root", **{name: [result[name] for result in results] for name in cases}}


@pytest.mark.parametrize(("count", "spec"), [(2, "rows"), (4, "columns")])
def test_each_process_reads_its_shards_and_all_is_verified(bundle, told, count, spec):
    results = told[spec] if spec in told else run_job(count, "restore", bundle, spec)
    translated = ot.state_utils.flatten_state_dict(ot.restore(bundle, None, [ot.transforms.Translate()]))
    for result in results:
        assert result["read"] == result["planned"]
        assert result["unverified"] == []
        for name, shards in result["shards"].items():
            for *index, total in shards:
                part = translated[name][tuple(slice(start, stop) for start, stop in index)]
                assert total == pytest.approx(float(np.sum(part, dtype=np.float64)), rel=1e-12, abs=1e-12)
    assert len({result["verified"] for result in results}) == 1
    with ot.open_checkpoint(bundle) as opened:
        stored = sum(leaf.nbytes for leaf in opened.leaves.values())
    # Matrices are split, vectors replicated.
    assert len(results) == count and all(result["read"] < 0.6 * stored for result in results)


def test_each_process_reads_its_old_rows_of_a_grown_vocabulary(whole, told):
    table = whole["shared/embedding"]
    rows, width = table.shape
    new_rows = rows + rows // 4
    expected = np.array(jax.random.normal(jax.random.key(0), (new_rows, width)))
    expected[:rows] = table
    half = new_rows // 2
    for index, result in enumerate(told["grown"]):
        old_rows = min(rows, (index + 1) * half) - index * half
        assert result["read"] == result["planned"] == old_rows * width * 4
        for start, values in result["shards"]:
            np.testing.assert_array_equal(np.float32(values), expected[start : start + len(values)])


def test_damage_that_only_all_processes_together_can_see(told):
    """A flipped bit in the rows of one process is an error in every process."""
    assert [result.get("error") for result in told["damaged"]] == ["CorruptCheckpointError"] * 2
    assert len({result["leaf"] for result in told["damaged"]}) == 1


@pytest.mark.parametrize("kind", ["bundle", "orbax"])
def test_full_verification_divides_its_extra_reads(whole, matrices, told, kind):
    """Each process restores a row of matrices; the rest of each matrix is read by one process."""
    rows = sum(whole[name][:4].nbytes for name in matrices)
    rest = sum(whole[name].nbytes for name in matrices) - (rows if kind != "orbax" else 0)
    assert sum(result["read"] for result in told[kind]) == rows + rest
    # The matrices are alike enough that each process has some of them.
    assert all(result["read"] < (rows + rest) * 3 // 4 for result in told[kind])
    for index, result in enumerate(told[kind]):
        assert result["verified"] == sorted(matrices) and result["unverified"] == []
        assert result["rows"] == {name: pytest.approx(float(whole[name][2 * index].sum())) for name in matrices}


def test_damage_in_what_one_process_reads_for_all_is_an_error_in_all(matrices, told):
    assert [result.get("error") for result in told["rest"]] == ["CorruptCheckpointError"] * 2
    assert {result["leaf"] for result in told["rest"]} == {matrices[3]}
    assert sum("on process" in result["text"] for result in told["rest"]) == 1


def test_a_process_that_can_not_read_ends_the_others_too(told):
    first, second = told["one fails"]
    assert first["error"] == "CheckpointIOError" and "process 1" in first["text"]
    assert second["error"] == "ValueError" and "closed" in second["text"]


@pytest.mark.parametrize("where", ["reading", "planning"])
def test_a_process_that_dies_ends_the_others_with_an_error_that_names_the_checkpoint(bundle, where):
    survivor, _ = run_job(2, "restore_where_one_dies", bundle, where, killed=[1])
    assert survivor["error"] == "CheckpointIOError" and "has died" in survivor["text"]
    assert str(bundle) in survivor["path"]


def test_save_and_restore_through_a_manager(bundle, told):
    assert told["saved"] == [{"same": True}] * 2
    name = ("target", "decoder", "layers_0", "mlp", "wo", "kernel")
    expected, got = ot.restore(bundle, None, [ot.transforms.Translate()]), ot.restore(told["root"] / "3", None)
    for part in name:
        expected, got = expected[part], got[part]
    np.testing.assert_array_equal(got, expected)
