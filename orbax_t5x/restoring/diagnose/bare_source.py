"""Hypothesis: one of several sources has another layout's names, and no transforms of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from orbax_t5x.restoring.chains import OneSource
from orbax_t5x.restoring.diagnose.hypothesis import Hypothesis, Remedy, UnmatchedLeaves
from orbax_t5x.restoring.diagnose.other_pack import pack_remedy
from orbax_t5x.text.code import calls_code


@dataclasses.dataclass(frozen=True)
class BareSource(Hypothesis):
    """A pack that leads from the names of one source to those of the target below the source's name."""

    def remedies(self, unmatched: UnmatchedLeaves) -> Iterator[Remedy]:
        for source, leaves in unmatched.bare_sources.items():
            found = pack_remedy(leaves, OneSource(source, ()).target_below(unmatched.target.original))
            if found is not None:
                advice = (
                    f"give the source its transforms: {{{source!r}: ot.Source(path, [{calls_code(found.transforms)}])}}"
                )
                yield Remedy(found.transforms, f"of the source {source!r}, {found.reason}", advice, source)
