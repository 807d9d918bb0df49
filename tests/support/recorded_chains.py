"""Transforms that describe themselves, and the entries of a chain in a record."""

from orbax_t5x.provenance.steps import steps_of


def entries_of(transforms):
    return [step.entry for step in steps_of(transforms)]


def digests_of(transforms):
    return [entry["digest"] for entry in entries_of(transforms)]


class Renaming:
    def __init__(self, text: str):
        self.text = text

    def __call__(self, state, target, *, is_resuming=False):
        return state

    def digest(self) -> str:
        return self.text

    def describe(self) -> str:
        return f"Renaming({self.text})"
