"""Hypothesis: the target is the encoder of a model, and the checkpoint holds the whole model."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from orbax_t5x.errors import Problem
from orbax_t5x.restoring.diagnose.hypothesis import Explanation, Hypothesis, UnmatchedLeaves
from orbax_t5x.restoring.diagnose.unexplained import LEAVE_UNREAD
from orbax_t5x.text.wording import leaves_text, listed

_ENCODER = re.compile(r"(?:.*[/.])?enc(?:oder)?[/.].*")
_DECODER = re.compile(r"(?:.*[/.])?(?:dec(?:oder)?[/.].*|(?:lm_head|logits_dense)[/.].*)")
_SHOWN_NAMES = 5


@dataclasses.dataclass(frozen=True)
class EncoderOnly(Hypothesis):
    """Leftover leaves of a decoder, and of its output projection, for a target without a decoder."""

    def explanations(self, unmatched: UnmatchedLeaves) -> Iterator[Explanation]:
        target = unmatched.target.leaves
        if any(map(_DECODER.fullmatch, target)) or not any(map(_ENCODER.fullmatch, target)):
            return
        names = [name for name in unmatched.leftovers if _DECODER.fullmatch(name)]
        if names:
            left = f"{leaves_text(len(names))} of the checkpoint's decoder"
            message = f"the target has an encoder and no decoder; left over: {left}: {listed(names, _SHOWN_NAMES)}"
            leaf = names[0] if len(names) == 1 else None
            yield Explanation(Problem("leftover", leaf, message, LEAVE_UNREAD), names)
