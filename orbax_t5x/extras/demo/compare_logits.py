"""Compares the logits of two checkpoints of a T5.

They run on the same tokens: the last doubt after a conversion. Each is restored by the rules that its names need into
the linen T5 of `orbax_t5x.models`, one after the other, in float32 on one device. Equal parameters under other names,
in another format or with stacked layers give equal logits.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from orbax_t5x.errors import UnsupportedCheckpointError
from orbax_t5x.models.config import T5Config, config_of
from orbax_t5x.models.linen import T5
from orbax_t5x.readers import Checkpoint
from orbax_t5x.restoring.api import restore
from orbax_t5x.text.report import Page, Report

# The share of each sequence that is padding at most.
_PADDING = 3
# What only a config.json tells.
_FUNCTION = ("activation", "scale_decoder_outputs", "max_distance", "layer_norm_epsilon")


@dataclasses.dataclass(frozen=True)
class LogitsReport(Report):
    """Comparison of the logits of two checkpoints."""

    a: str
    b: str
    shape: tuple[int, int, int]
    max_abs: float
    largest: float
    same_top: int
    is_close: bool

    @property
    def max_rel(self) -> float:
        """The largest difference relative to the largest logit."""
        return self.max_abs / self.largest if self.largest else self.max_abs

    def to_json(self) -> dict[str, Any]:
        """Returns the report for programs.

        A difference that is no number is None.
        """
        numbers = {"max_abs": self.max_abs, "max_rel": self.max_rel, "largest": self.largest}
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        return {**super().to_json(), **finite, "positions": math.prod(self.shape[:2])}

    def page(self) -> Page:
        """Returns the contents for people."""
        sequences, length, ids = self.shape
        outcome = "equal within the tolerances" if self.is_close else "different"
        title = f"logits of {sequences} sequences of {length} tokens over {ids} ids: {outcome}"
        head = [
            f"maximal difference {self.max_abs:.3g}, relative to the largest logit {self.max_rel:.3g}",
            f"the most likely token is the same at {self.same_top} of {sequences * length} positions",
        ]
        return Page(title=title, head=head)


def compare_logits(
    a: Checkpoint,
    b: Checkpoint,
    *,
    sequences: int = 2,
    length: int = 16,
    seed: int = 0,
    atol: float = 1e-4,
    rtol: float = 1e-4,
) -> LogitsReport:
    """Compares the logits of two checkpoints on random tokens."""
    configs = _configs(a, b)
    vocab = min(config.vocab for config in configs)
    ids = _tokens(sequences, length, vocab, seed)
    one, other = (
        _logits(checkpoint, config, ids)[..., :vocab] for checkpoint, config in zip((a, b), configs, strict=True)
    )
    max_abs, largest = float(np.max(np.abs(one - other))), float(np.max(np.abs(other)))
    return LogitsReport(
        str(a.path),
        str(b.path),
        one.shape,
        max_abs,
        largest,
        int(np.sum(np.argmax(one, axis=-1) == np.argmax(other, axis=-1))),
        max_abs <= atol + rtol * largest,
    )


def _configs(a: Checkpoint, b: Checkpoint) -> list[T5Config]:
    """Finds both configs; an unknown config is the other's."""
    found: list[T5Config | None] = []
    unknown: list[UnsupportedCheckpointError] = []
    for checkpoint in (a, b):
        try:
            found.append(config_of(checkpoint))
        except UnsupportedCheckpointError as error:
            found.append(None)
            unknown.append(error)
    known = [config for config in found if config is not None]
    if not known:
        raise unknown[0]
    configs = [config or known[0] for config in found]
    owners = [checkpoint.metadata.get("config") is not None for checkpoint in (a, b)]
    if sum(owners) == 1 and configs[0].tied == configs[1].tied:
        owner = configs[owners.index(True)]
        function = {name: getattr(owner, name) for name in _FUNCTION}
        configs = [dataclasses.replace(config, **function) for config in configs]
    return configs


def _tokens(sequences: int, length: int, vocab: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Makes inputs and targets.

    The inputs of every second sequence have padding at their end.
    """
    rng = np.random.default_rng(seed)
    inputs, targets = (rng.integers(1, vocab, (sequences, length), np.int32) for _ in range(2))
    inputs[1::2, length - length // _PADDING :] = 0
    return inputs, targets


def _logits(checkpoint: Checkpoint, config: T5Config, ids: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    model = T5(config)
    target = {"target": jax.eval_shape(model.init, jax.random.key(0), *ids)["params"]}
    # The names say which rules are needed: what has been applied before is not found again.
    params = restore(checkpoint, target, "auto", is_resuming=False, allow_lossy_cast=True)["target"]
    return np.asarray(jax.jit(model.apply)({"params": params}, *ids))
