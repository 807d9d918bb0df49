"""Low-rank adapters (LoRA) merged into their kernels; nothing is read."""

from __future__ import annotations

import dataclasses

from orbax_t5x.errors import Fix
from orbax_t5x.lazy import View
from orbax_t5x.lazy.several import add_low_rank
from orbax_t5x.transforms.by_rules import ByRules, Matches
from orbax_t5x.transforms.diagnostics import Diagnostics, NewState, combine_leaves
from orbax_t5x.transforms.patterns.table import Pattern, check_pattern, expand
from orbax_t5x.trees.flat import FlatState


@dataclasses.dataclass(frozen=True)
class AddLowRank(ByRules):
    r"""Sum of kernels and `scale * down @ up`, whose factors are consumed.

    Sums are made in float32 (float64 where a leaf has 64 bits) and rounded to the kernel's dtype once; each shard reads
    its part of the kernel, the rows of `down` and the columns of `up` that belong to it. A kernel of more dimensions
    has some of them in `down` and the others in `up`: [in, rank] and [rank, heads, head_dim]. A kernel that matches and
    has neither factor stays as it is; only one of them is a problem. The optimizer's moments cannot follow: they
    belong to the kernel that was trained, not to the sum. `follow=False` keeps them as they are.

    Attributes:
      pattern: a regex that must match a kernel's whole name.
      down: the name of the factor [in, rank]; it may use the pattern's groups.
      up: the name of the factor [rank, out], likewise.
      scale: of the product; for LoRA alpha / rank.
      require_match: whether it is an error that no kernel has factors.

    Example:
      >>> merge = ot.transforms.AddLowRank(r"(.*)/kernel", r"\1/lora_a", r"\1/lora_b", scale=2.0)
      >>> state = {"q": {"kernel": np.eye(2), "lora_a": np.ones((2, 1)), "lora_b": np.ones((1, 2))}}
      >>> np.asarray(merge(state, {})["q"]["kernel"])
      array([[3., 2.],
             [2., 3.]])
    """

    pattern: Pattern
    down: str
    up: str
    scale: float
    require_match: bool = True

    def __post_init__(self) -> None:
        check_pattern(self.pattern, "AddLowRank")
        if not isinstance(self.down, str) or not isinstance(self.up, str):
            raise TypeError(f"AddLowRank: down and up are names, not {self.down!r} and {self.up!r}")
        object.__setattr__(self, "scale", float(self.scale))

    def _build(self, state: FlatState, matches: Matches, new: NewState, diagnostics: Diagnostics) -> None:
        factors: dict[str, tuple[str, str]] = {}
        for name, (_, match) in matches.items():
            down, up = (expand(match, template, self._rule(), diagnostics) for template in (self.down, self.up))
            if down is not None and up is not None and state[name] is not None:
                factors[name] = down, up
        known = {name: pair for name, pair in factors.items() if any(state.get(factor) is not None for factor in pair)}
        if factors and not known and self.require_match:
            name, (down, up) = next(iter(factors.items()))
            message = f"{self._rule()}: no kernel has factors; of {name!r} they would be {down!r} and {up!r}"
            diagnostics.problem("unused_rule", None, message, Fix("correct the names of the factors, or remove it"))
        taken = {factor for pair in known.values() for factor in pair}
        for name, value in state.items():
            if name in known:
                self._put_sum(name, known[name], state, new, diagnostics)
            elif name not in taken:
                new.put(name, value, name)

    def _put_sum(
        self, name: str, factors: tuple[str, str], state: FlatState, new: NewState, diagnostics: Diagnostics
    ) -> None:
        """Puts the sum, or the kernel after a problem."""
        lacking = [factor for factor in factors if state.get(factor) is None]
        made = None
        if lacking:
            message = f"{self._rule()}: {name!r} has only one factor, there is no {lacking[0]!r}"
            diagnostics.problem("missing", name, message, Fix("give it both factors, or drop the other one"))
        else:

            def add(views: list[View]) -> View:
                return add_low_rank(views[0], views[1], views[2], self.scale)

            leaves, rule = [(one, state[one]) for one in (name, *factors)], self._rule()
            advice = "correct the names of the factors, or transpose or cast them first"
            made = combine_leaves(leaves, add, diagnostics, becomes=name, rule=rule, advice=advice)
        new.put(name, state[name] if made is None else made, name, None if made is None else self._rule())
