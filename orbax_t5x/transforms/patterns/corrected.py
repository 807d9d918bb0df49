"""Corrects one word of a replacement where that names leaves that exist."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from orbax_t5x.transforms.patterns.template import expand_match

_WORD = re.compile(r"[A-Za-z]+")


def corrected_template(
    template: str, matches: Sequence[re.Match[str]], closest: Iterable[str], names: Collection[str]
) -> str | None:
    """Returns the template with one word changed so that it gives an existing name for every match.

    None where no such change of one word is found, or two are. `closest` are names close to what it gives for the first
    match.
    """
    words = _WORD.findall(expand_match(matches[0], template))
    found: set[str] = set()
    for name in closest:
        wanted = _WORD.findall(name)
        changed = {(word, other) for word, other in zip(words, wanted, strict=False) if word != other}
        if len(words) != len(wanted) or len(changed) != 1:
            continue
        word, other = changed.pop()
        # No letter before or after, and no group's number or name: `\\g<word>` stays.
        mended = re.sub(rf"(?<![A-Za-z\\<]){word}(?![A-Za-z>])", other, template)
        if mended != template and all(expand_match(match, mended) in names for match in matches):
            found.add(mended)
    return found.pop() if len(found) == 1 else None
