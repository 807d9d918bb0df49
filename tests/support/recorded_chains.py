"""Transforms that describe themselves."""


class Renaming:
    def __init__(self, text: str):
        self.text = text

    def __call__(self, state, target, *, is_resuming=False):
        return state

    def digest(self) -> str:
        return self.text

    def describe(self) -> str:
        return f"Renaming({self.text})"
