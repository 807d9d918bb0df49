"""Roots with something else beside their steps: the newest step is opened, and conversions put nothing there."""

import os
import tarfile
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointIOError
from tests.conftest import GOLDENS


def t5x_root(directory: Path) -> Path:
    with tarfile.open(GOLDENS / "t5x_native" / "d8_bf16.tar.gz") as archive:
        archive.extractall(directory, filter="data")
    return next(directory.rglob("checkpoint_3")).parent


def manager_root(directory: Path) -> Path:
    with ocp.CheckpointManager(directory) as manager:
        for step in (3, 7):
            manager.save(step, args=ocp.args.StandardSave({"w": np.full(3, step)}))
    return directory


def items_root(directory: Path) -> Path:
    """Of steps that were saved without items."""
    for step in (2, 10):
        save(directory / f"checkpoint_{step}")
    return directory


def save(path: Path) -> None:
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path, {"stray": np.zeros(2)})


ROOTS = {"t5x": t5x_root, "manager": manager_root, "items": items_root}


@pytest.fixture(
    params=[(kind, name) for kind in ROOTS for name in ("run", "run_2024")], ids=lambda param: "-".join(param)
)
def root(request, tmp_path) -> Path:
    kind, name = request.param
    return ROOTS[kind](tmp_path / name)


# A name whose end is no step.
BY_KIND = pytest.mark.parametrize("root", [(kind, "run_2024") for kind in ROOTS], indirect=True, ids=list(ROOTS))


def opened(path: Path) -> tuple[str, str, int | None]:
    with ot.open_checkpoint(path) as checkpoint:
        return checkpoint.format, checkpoint.path, checkpoint.step


@pytest.mark.slow
def test_a_stray_item_hides_no_step(root):
    before, latest = opened(root), ot.latest_step(root)
    assert before[2] == latest is not None
    save(root / "out")
    save(root / "nested" / "out")
    assert opened(root) == before and ot.latest_step(root) == latest
    assert opened(root / "out")[1] == str(root / "out")
    assert ot.restore(root, None).keys() == ot.restore(before[1], None).keys()


def test_a_step_without_the_marker_keeps_its_items(tmp_path):
    """Early Orbax wrote none."""
    for item in ("default", "layer_1"):
        for step in ("5", "step_5"):
            save(tmp_path / step / item)
        (tmp_path / "step_5" / item / "_CHECKPOINT_METADATA").unlink(missing_ok=True)
    for name in ("params", "optimizer"):
        save(tmp_path / "plain" / name)
        (tmp_path / "plain" / name / "_CHECKPOINT_METADATA").unlink(missing_ok=True)
    for step in ("5", "step_5"):
        assert ot.open_checkpoint(tmp_path / step).leaves.keys() == {"default/stray", "layer_1/stray"}
    assert ot.open_checkpoint(tmp_path / "plain").leaves.keys() == {"params/stray", "optimizer/stray"}


@pytest.mark.slow
@BY_KIND
def test_no_conversion_writes_into_the_root_that_it_reads(root):
    before, names = opened(root), sorted(os.listdir(root))
    for source in (root, {"x": root}, ot.open_checkpoint(root)):
        for inside in ("out", "deep/out", "checkpoint_99"):
            with pytest.raises(CheckpointIOError, match=r"is inside the source .*; choose a destination outside of it"):
                ot.convert(source, root / inside)
    assert opened(root) == before and sorted(os.listdir(root)) == names


@pytest.mark.slow
@BY_KIND
def test_a_conversion_of_a_step_writes_beside_it_and_not_into_it(root):
    before, names = opened(root), sorted(os.listdir(root))
    step = root / {3: "checkpoint_3", 7: "7", 10: "checkpoint_10"}[before[2]]
    for inside in (step / "out", step / "default" / "out"):
        with pytest.raises(CheckpointIOError, match=r"is inside the source"):
            ot.convert(step, inside)
    assert sorted(os.listdir(root)) == names
    ot.convert(step, root / "out")
    assert opened(root) == before
    ot.convert(step, root.parent / "out_3")
    ot.convert(step, root / "other_3")


def test_an_item_is_not_put_beside_another_of_its_step(tmp_path):
    root = manager_root(tmp_path / "run")
    with pytest.raises(CheckpointIOError, match=r"is inside the source"):
        ot.convert(root / "7" / "default", root / "7" / "other")
    # The item itself may be replaced.
    ot.convert(root / "7" / "default", root / "7" / "default", overwrite=True)
    assert opened(root)[1:] == (str(root / "7" / "default"), 7)
    np.testing.assert_array_equal(ot.restore(root, None)["w"], np.full(3, 7))
