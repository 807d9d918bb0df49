"""A saved Orbax item, copied for each test that damages it."""

import logging
import shutil

import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.support.orbax_items import TREE


@pytest.fixture
def quiet_logs():
    """Orbax logs the tracebacks of what it also raises."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The tree in each layout, saved once."""
    root = tmp_path_factory.mktemp("saved")
    for ocdbt in (True, False):
        for zarr3 in (True, False):
            handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)
            with ocp.Checkpointer(handler) as checkpointer:
                checkpointer.save(root / f"{ocdbt}{zarr3}", args=ocp.args.PyTreeSave(TREE))
    return root


@pytest.fixture
def item(saved, tmp_path):
    """A copy of one layout: `item(ocdbt=True, zarr3=False)`."""

    def copy(*, ocdbt=True, zarr3=False, to="item"):
        shutil.rmtree(tmp_path / to, ignore_errors=True)
        return shutil.copytree(saved / f"{ocdbt}{zarr3}", tmp_path / to, symlinks=True)

    return copy


@pytest.fixture(scope="module")
def several_items(tmp_path_factory):
    root = tmp_path_factory.mktemp("several")
    options = ocp.CheckpointManagerOptions(
        enable_async_checkpointing=False, step_prefix="ckpt", step_format_fixed_length=8
    )
    with ocp.CheckpointManager(root, options=options) as manager:
        manager.save(
            40,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave({"w": np.ones(2)}),
                opt=ocp.args.PyTreeSave({"m": {"w": np.zeros(2)}, "count": None}, custom_metadata={"x": 1}),
                array=ocp.args.ArraySave(np.arange(3)),
                config=ocp.args.JsonSave({"lr": 0.1}),
            ),
            metrics={"loss": 1.0},
        )
    return root
