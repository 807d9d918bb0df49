"""Kept steps by T5X's options: the newest or best."""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath


@dataclasses.dataclass(frozen=True)
class Retention:
    """A policy of `ocp.CheckpointManager` with the options of T5X's manager.

    Attributes:
      directory: of the run.
      keep: how many steps are kept; None: all.
      force_keep_period: multiples of this step are kept for ever.
      metric: `train/loss` is the tag `loss` of the files in `train`; None: the newest steps are kept.
      mode: "max" or "min", the better end.
      keeps_unmeasured: steps without a metric are kept for ever.
    """

    directory: str
    keep: int | None = None
    force_keep_period: int | None = None
    metric: str | None = None
    mode: str = "max"
    keeps_unmeasured: bool = True

    def __post_init__(self) -> None:
        if self.mode not in ("max", "min"):
            raise ValueError(f"metric_mode={self.mode!r} is neither 'max' nor 'min'")
        if self.keep is not None and self.keep < 1:
            raise ValueError(f"keep={self.keep} keeps no step; None keeps all")
        if self.metric is not None and "/" not in self.metric:
            raise ValueError(f"metric_name_to_monitor={self.metric!r} names no directory: 'train/{self.metric}'")
        if self.metric is not None:
            _tensorboard("backend.event_processing.event_file_loader")

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """Implements Orbax's `PreservationPolicy`; the newest step is always kept."""
        del context
        steps = [checkpoint.step for checkpoint in checkpoints]
        kept = self.kept(steps, {} if self.metric is None else metrics(self.directory, self.metric))
        return [step in kept for step in steps]

    def kept(self, steps: Sequence[int], measured: Mapping[int, float]) -> set[int]:
        """Selects the steps to keep; `measured` has the metrics."""
        if self.keep is None:
            return {*steps}
        period = self.force_keep_period
        kept = {step for step in steps if period and step % period == 0} | {*steps[-1:]}
        if self.metric is None:
            return kept | {*steps[-self.keep :]}
        best = sorted(
            (step for step in steps if step in measured), key=measured.__getitem__, reverse=self.mode == "min"
        )
        kept |= {*best[-self.keep :]}
        return kept | {step for step in steps if step not in measured and self.keeps_unmeasured}


def metrics(directory: str, name: str) -> dict[int, float]:
    """Reads a scalar by step from TensorBoard's files.

    NaN counts as absent. The directory of `inference_eval/task/loss` is the longest that exists below the run's.
    """
    parts = name.split("/")
    for cut in range(len(parts) - 1, 0, -1):
        folder = epath.Path(directory).joinpath(*parts[:cut])
        if folder.is_dir():
            return _scalars(folder, "/".join(parts[cut:]))
    return {}


def _scalars(folder: epath.Path, tag: str) -> dict[int, float]:
    loader = _tensorboard("backend.event_processing.event_file_loader").EventFileLoader
    array_of = _tensorboard("util.tensor_util").make_ndarray
    found: dict[int, float] = {}
    for file in sorted(folder.glob("*tfevents*")):
        for event in loader(os.fspath(file)).Load():
            for value in event.summary.value if event.HasField("summary") else ():
                if value.tag == tag and value.HasField("tensor"):
                    number = array_of(value.tensor)
                    if number.size == 1 and not math.isnan(float(number.reshape(()))):
                        found[int(event.step)] = float(number.reshape(()))
    return found


def _tensorboard(module: str) -> Any:
    try:
        return importlib.import_module(f"tensorboard.{module}")
    except ImportError as error:
        raise ImportError("metric_name_to_monitor reads TensorBoard's files: pip install tensorboard") from error
