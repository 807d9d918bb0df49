"""Asynchronous saves through Orbax v1 beside stock v1: `python -m benchmarks.saves_v1 [--saves N] [--mib N] …`.

As `benchmarks.saves`, with a `training.Checkpointer` for each way, in one process: each saves in turn, in an order that
rotates, and the ratios are medians of the ratios of the rounds.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from benchmarks import saves

_PAIRS = (
    ("ours", "stock v1"),
    ("ours, checksums=False", "stock v1"),
    ("ours", "ours, checksums=False"),
    ("stock again", "stock v1"),
)


class _AsManager:
    """A `training.Checkpointer` with the two calls of a `CheckpointManager` that are measured."""

    def __init__(self, folder: Path, context):
        import orbax.checkpoint.experimental.v1 as ocp

        kept = ocp.training.preservation_policies.LatestN(1)
        self._checkpointer = ocp.training.Checkpointer(folder, context=context, preservation_policy=kept)

    def save(self, step, args):
        self._checkpointer.save_async(step, args, force=True)

    def wait_until_finished(self):
        self._checkpointer.wait()

    def close(self):
        self._checkpointer.close()


def save_in_turn(folder: Path, count: int, mebibytes: int) -> dict[str, dict[str, list[float]]]:
    """Way -> figure -> seconds of each measured save."""
    import jax
    import orbax.checkpoint.experimental.v1 as ocp

    import orbax_t5x as ot

    contexts = {
        "stock v1": ocp.Context(),
        "ours": ot.v1.context(),
        "ours, checksums=False": ot.v1.context(checksums=False),
        "stock again": ocp.Context(),
    }
    managers = {way: _AsManager(folder / str(index), made) for index, (way, made) in enumerate(contexts.items())}
    state = saves.make_state(mebibytes)
    train = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state))
    measured = {way: {figure: [] for figure in saves.FIGURES} for way in managers}
    names = list(managers)
    for step in range(saves.WARM_UP_ROUNDS + count):
        turn = step % len(names)
        for way in names[turn:] + names[:turn]:
            state = jax.block_until_ready(train(state))
            figures = saves.one_save(managers[way], step, state)
            if step >= saves.WARM_UP_ROUNDS:
                for figure, seconds in figures.items():
                    measured[way][figure].append(seconds)
    for manager in managers.values():
        manager.close()
    return measured


def main() -> None:
    """Measures one job and prints it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.saves_v1", description="Compares saves of Orbax v1.")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--saves", type=int, default=30, help="measured saves of each way (at least 2)")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--devices", type=int, default=8)
    given = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={given.devices}"
    with tempfile.TemporaryDirectory(prefix="saves-v1-", dir=given.folder) as folder:
        saves.show(save_in_turn(Path(folder), given.saves, given.mib), _PAIRS)


if __name__ == "__main__":
    main()
