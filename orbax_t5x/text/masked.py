"""Masks of secrets in texts, URLs and headers.

Masked are users and passwords, queries and fragments of URLs, tokens and headers of requests.
"""

from __future__ import annotations

import functools
import re

# `pathlib` makes one slash of two.
_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]+:/+"
# In quotes, a URL may hold blanks.
_URL = re.compile(rf"(?P<scheme>(?P<quote>['\"])?{_SCHEME})" r"(?P<rest>(?(quote)(?:(?!(?P=quote)).)+|[^\s'\"<>]+))")
_URL_PATH = re.compile(rf"(?P<scheme>{_SCHEME})(?P<rest>.+)", re.DOTALL)
# Characters, and what is written for them in a URL, perhaps several times.
_AT = re.compile(r"@|%(?:25)*40", re.IGNORECASE)
_COLON = re.compile(r":(?!\d+$)|%(?:25)*3A", re.IGNORECASE)
_QUERY = re.compile(r"(?P<mark>[?#]|%(?:25)*(?:3F|23)).*", re.IGNORECASE | re.DOTALL)
_ASSIGNED = re.compile(
    r"(?P<name>(?:token|secret|passw(?:or)?d|signature|sig|credentials?|(?:api|access)[_-]?key(?:[_-]?id)?)=)[^&;\s/'\"]+",
    re.IGNORECASE,
)
_TOKENS = (
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}"), "hf_…"),
    (re.compile(r"(authorization['\"]?\s*[:=]\s*['\"]?)[^'\"\r\n,;]+", re.IGNORECASE), r"\1…"),
    (re.compile(r"\b(bearer\s+)[A-Za-z0-9._~+/=-]+", re.IGNORECASE), r"\1…"),
    (_ASSIGNED, r"\g<name>…"),
    # A query without its URL, as libraries quote it.
    (re.compile(r"\?[A-Za-z0-9_.-]+=[^\s'\"<>]+"), "?…"),
)


def masked(text: str, *, is_path: bool = False) -> str:
    """Replaces secrets of URLs and headers by `…`.

    With `is_path` the text is a path or URL.
    """
    if ":/" in text:
        text = (_URL_PATH if is_path else _URL).sub(_masked_url, text)
    for pattern, replacement in _TOKENS:
        text = pattern.sub(replacement, text)
    return text


@functools.lru_cache(maxsize=64)
def masked_path(path: str) -> str:
    """Masks a path or URL, as `masked` does."""
    return masked(path, is_path=True)


def _masked_url(match: re.Match[str]) -> str:
    rest = match["rest"]
    server = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if len(server) < len(head := rest.partition("/")[0]) and _AT.search(head):
        return f"{match['scheme']}…"  # a query, or a name with such a mark: either may be the secret
    # A password may hold the marks that end a server's name; only a port follows a colon there.
    within = rest if _COLON.search(server) else server
    if found := list(_AT.finditer(within)):
        rest = f"…@{rest[found[-1].end() :]}"
    return match["scheme"] + _QUERY.sub(r"\g<mark>…", rest)
