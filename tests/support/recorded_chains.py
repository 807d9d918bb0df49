"""Transforms that describe themselves, and the digest of a chain in its record."""

from orbax_t5x.provenance.chains import digest_of_rules, record_rules


def chain_digest(transforms):
    return digest_of_rules(record_rules(transforms))


class Renaming:
    def __init__(self, text: str):
        self.text = text

    def __call__(self, state, target, *, is_resuming=False):
        return state

    def digest(self) -> str:
        return self.text

    def describe(self) -> str:
        return f"Renaming({self.text})"
