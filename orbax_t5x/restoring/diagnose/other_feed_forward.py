"""Hypothesis: the feed-forward layers are gated in one of the two models and plain in the other."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from orbax_t5x.errors import Fix, Problem
from orbax_t5x.restoring.diagnose.hypothesis import Explanation, Hypothesis, UnmatchedLeaves

_FEED_FORWARD = re.compile(r"(?P<layer>.*)/mlp/wi(?P<gate>|_0|_1)/kernel")
_GATED = ("gated (mlp/wi_0, mlp/wi_1)", "('gelu', 'linear')")
_PLAIN = ("not gated (mlp/wi)", "('relu',)")


@dataclasses.dataclass(frozen=True)
class OtherFeedForward(Hypothesis):
    """T5X's `mlp/wi` against `mlp/wi_0` and `mlp/wi_1`, layer by layer."""

    def explanations(self, unmatched: UnmatchedLeaves) -> Iterator[Explanation]:
        matches = filter(None, map(_FEED_FORWARD.fullmatch, unmatched.stored))
        gated = {match["layer"]: bool(match["gate"]) for match in matches}
        for name in unmatched.wanted:
            match = _FEED_FORWARD.fullmatch(name)
            if match is None or gated.get(match["layer"], bool(match["gate"])) == bool(match["gate"]):
                continue
            (theirs, activations), (ours, _) = (_PLAIN, _GATED) if match["gate"] else (_GATED, _PLAIN)
            message = f"the checkpoint's feed-forward layers are {theirs}, and the target's are {ours}"
            fix = Fix.by_target(f"build the model as the checkpoint's was (T5X: mlp_activations={activations})")
            yield Explanation(Problem("missing", None, message, fix), (name,))
