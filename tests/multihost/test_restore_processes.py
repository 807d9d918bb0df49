"""Several real processes, two devices each: each reads only what its own shards need, and together they verify it."""

import shutil
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot
from tests.support.jax_job import run_job

pytestmark = pytest.mark.slow


@pytest.fixture
def bundle(goldens):
    return goldens / "tf_bundle" / "t5_1_1_f32"


@pytest.mark.parametrize(("count", "spec"), [(2, "rows"), (4, "columns")])
def test_each_process_reads_its_shards_and_all_is_verified(bundle, count, spec):
    results = run_job(count, "restore", bundle, spec)
    whole = ot.state_utils.flatten_state_dict(ot.restore(bundle, None, [ot.transforms.Translate()]))
    for result in results:
        assert result["read"] == result["planned"]
        assert result["unverified"] == []
        for name, shards in result["shards"].items():
            for *index, total in shards:
                part = whole[name][tuple(slice(start, stop) for start, stop in index)]
                assert total == pytest.approx(float(np.sum(part, dtype=np.float64)), rel=1e-12, abs=1e-12)
    assert len({result["verified"] for result in results}) == 1
    with ot.open_checkpoint(bundle) as opened:
        stored = sum(leaf.nbytes for leaf in opened.leaves.values())
    # Matrices are split, vectors replicated.
    assert all(result["read"] < 0.6 * stored for result in results)


def test_each_process_reads_its_old_rows_of_a_grown_vocabulary(bundle):
    table = ot.restore(bundle, None, [ot.transforms.Translate()])["target"]["token_embedder"]["embedding"]
    rows, width = table.shape
    new_rows = rows + rows // 4
    expected = np.array(jax.random.normal(jax.random.key(0), (new_rows, width)))
    expected[:rows] = table
    half = new_rows // 2
    for index, result in enumerate(run_job(2, "grow", bundle, new_rows)):
        old_rows = min(rows, (index + 1) * half) - index * half
        assert result["read"] == result["planned"] == old_rows * width * 4
        for start, values in result["shards"]:
            np.testing.assert_array_equal(np.float32(values), expected[start : start + len(values)])


def test_damage_that_only_all_processes_together_can_see(bundle, tmp_path):
    """A flipped bit in the rows of one process is an error in every process."""
    damaged = tmp_path / "damaged"
    shutil.copytree(bundle, damaged)
    shard = sorted(damaged.glob("*.data-*"), key=lambda path: path.stat().st_size)[-1]
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    results = run_job(2, "restore", damaged, "rows")
    assert [result.get("error") for result in results] == ["CorruptCheckpointError"] * 2
    assert len({result["leaf"] for result in results}) == 1


@pytest.fixture(params=["bundle", "orbax"])
def matrices(request, bundle, tmp_path):
    """A checkpoint with checksums, and some of its matrices by name."""
    with ot.open_checkpoint(bundle) as opened:
        names = [name for name, leaf in opened.leaves.items() if name.endswith("/kernel") and len(leaf.shape) == 2][:5]
    assert len(names) == 5
    path = bundle
    if request.param == "orbax":
        path = tmp_path / "orbax"
        with ocp.Checkpointer(ot.TrainStateHandler()) as checkpointer:
            checkpointer.save(path, args=ot.args.TrainStateSave(ot.restore(bundle, None)))
    whole = ot.state_utils.flatten_state_dict(ot.restore(bundle, None))
    return path, {name: whole[name] for name in names}


def test_full_verification_divides_its_extra_reads(matrices):
    """Each process restores a row of matrices; the rest of each matrix is read by one process."""
    path, whole = matrices
    results = run_job(2, "restore_first_rows", path, *whole)
    rows = sum(array[:4].nbytes for array in whole.values())
    rest = sum(array.nbytes for array in whole.values()) - (rows if path.name != "orbax" else 0)
    assert sum(result["read"] for result in results) == rows + rest
    # The matrices are alike enough that each process has some of them.
    assert all(result["read"] < (rows + rest) * 3 // 4 for result in results)
    for index, result in enumerate(results):
        assert result["verified"] == sorted(whole) and result["unverified"] == []
        assert result["rows"] == {name: pytest.approx(float(whole[name][2 * index].sum())) for name in whole}


def test_damage_in_what_one_process_reads_for_all_is_an_error_in_all(bundle, tmp_path):
    with ot.open_checkpoint(bundle) as opened:
        names = [name for name, leaf in opened.leaves.items() if name.endswith("/kernel") and len(leaf.shape) == 2][:5]
        ends = opened.leaves[names[3]].leaf.range
    damaged = tmp_path / "damaged"
    shutil.copytree(bundle, damaged)
    file = damaged / Path(ends.file.path).name
    data = bytearray(file.read_bytes())
    data[ends.offset + ends.nbytes - 1] ^= 1
    file.write_bytes(data)
    results = run_job(2, "restore_first_rows", damaged, *names)
    assert [result.get("error") for result in results] == ["CorruptCheckpointError"] * 2
    assert {result["leaf"] for result in results} == {names[3]}
    assert sum("on process" in result["text"] for result in results) == 1


def test_a_process_that_can_not_read_ends_the_others_too(bundle):
    first, second = run_job(2, "restore_where_one_fails", bundle)
    assert first["error"] == "CheckpointIOError" and "process 1" in first["text"]
    assert second["error"] == "ValueError" and "closed" in second["text"]


@pytest.mark.parametrize("where", ["reading", "planning"])
def test_a_process_that_dies_ends_the_others_with_an_error_that_names_the_checkpoint(bundle, where):
    survivor, _ = run_job(2, "restore_where_one_dies", bundle, where, killed=[1])
    # On a busy machine the silence of its key is noticed before its connection's end.
    assert survivor["error"] == "CheckpointIOError"
    assert "has died" in survivor["text"] or "process 1 has sent no heartbeat" in survivor["text"]
    assert str(bundle) in survivor["path"]


@pytest.mark.parametrize(("stopped", "where"), [(0, "reading"), (1, "planning")])
def test_a_process_that_stops_ends_the_others_with_an_error(bundle, stopped, where):
    """Process 0 holds the coordination service, which then does not answer either."""
    results = run_job(2, "restore_where_one_stops", bundle, stopped, where, stopped=[stopped])
    survivor = results[1 - stopped]
    assert survivor["error"] == "CheckpointIOError"
    said = f"process {stopped} has sent no heartbeat", "the coordination service of JAX has not answered"
    assert said[0] in survivor["text"] or (stopped == 0 and said[1] in survivor["text"])
    assert str(bundle) in survivor["path"]


def test_a_slow_process_is_waited_for(bundle):
    assert run_job(2, "restore_where_one_is_slow", bundle) == [{"slow": False}, {"slow": True}]


def test_save_and_restore_through_a_manager(bundle, tmp_path):
    assert run_job(2, "save_and_restore", bundle, tmp_path / "root") == [{"same": True}] * 2
    expected = ot.restore(bundle, None, [ot.transforms.Translate()])
    got = ot.restore(tmp_path / "root" / "3", None)
    np.testing.assert_array_equal(
        got["target"]["decoder"]["layers_0"]["mlp"]["wo"]["kernel"],
        expected["target"]["decoder"]["layers_0"]["mlp"]["wo"]["kernel"],
    )
