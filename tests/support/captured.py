"""Standard error of a command, without what depends on the machine's speed."""


def without_progress(text: str) -> str:
    """Removes the lines that a slow command writes of its progress where no terminal is."""
    verbs = ("converting", "verifying", "comparing", "restoring")
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith(verbs))
