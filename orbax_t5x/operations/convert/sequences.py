"""Finds a converted tree's lists.

They were lists or tuples in the source.

Stock Orbax records for each key whether it belongs to a dict or a sequence, and restores only into a tree that agrees.
Names do not show it: `layers/0` may be either. A container of the result is a list if its keys are 0, 1, …, and each
leaf below comes from a leaf below a sequence, under the same index.
"""

from __future__ import annotations

from typing import Any

from orbax_t5x.restoring.plan import RestorePlan


def with_sequences(tree: Any, plan: RestorePlan) -> Any:
    """Turns dicts of a planned tree into lists as in the source.

    They were sequences there.
    """
    sequences: set[str] = set()
    for prefix, checkpoint in plan.checkpoints.items():
        sequences.update("/".join(part for part in (prefix, name) if part) for name in checkpoint.sequences)
    return _ListBuilder(sequences, _origins(plan)).of("", tree) if sequences else tree


def _origins(plan: RestorePlan) -> dict[str, set[str | None]]:
    """Maps each container of the result to its source containers.

    Its children come from these; None for a renamed child.
    """
    origins: dict[str, set[str | None]] = {}
    for entry in plan.entries:
        for source in entry.sources:
            for container, origin in _pairs(entry.name.split("/"), source.split("/")):
                origins.setdefault(container, set()).add(origin)
    return origins


def _pairs(name: list[str], source: list[str]) -> list[tuple[str, str | None]]:
    """Pairs containers above a leaf and above its source.

    They have the same children.

    Both names begin and end with common parts; the parts between were renamed.
    """
    shorter = min(len(name), len(source))
    begin = next((depth for depth in range(shorter) if name[depth] != source[depth]), shorter)
    end = next((depth for depth in range(shorter) if name[-1 - depth] != source[-1 - depth]), shorter)
    pairs: list[tuple[str, str | None]] = []
    for depth in range(len(name)):
        origin = None
        if depth < begin:
            origin = "/".join(name[:depth])
        elif depth >= len(name) - end:
            origin = "/".join(source[: depth + len(source) - len(name)])
        pairs.append(("/".join(name[:depth]), origin))
    return pairs


class _ListBuilder:
    """Converter of a tree's dicts to lists."""

    def __init__(self, sequences: set[str], origins: dict[str, set[str | None]]):
        self._sequences = sequences
        self._origins = origins

    def of(self, name: str, node: Any) -> Any:
        """Converts a node of the tree with all below it."""
        if type(node) is not dict or not node:
            return node
        made = {key: self.of(f"{name}/{key}" if name else key, child) for key, child in node.items()}
        # None and empty containers keep their names, and so does what only has such children.
        if not self._origins.get(name, {name}) <= self._sequences:
            return made
        keys = [str(index) for index in range(len(made))]
        return [made[key] for key in keys] if made.keys() == set(keys) else made
