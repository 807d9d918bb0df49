"""A file's versions as a server tells them.

This module knows what their absence or difference proves.
"""

from __future__ import annotations

from typing import NamedTuple


class Version(NamedTuple):
    """Marks of a file's contents, each empty if it is not sent.

    Attributes:
      tag: a strong ETag, or the generation of an object in a bucket.
      weak: the value of a weak ETag.
      modified: the value of Last-Modified.
    """

    tag: bytes = b""
    weak: bytes = b""
    modified: bytes = b""

    def is_followed_by(self, later: Version) -> bool:
        """Reports whether a later answer may be of the same contents.

        A tag that is missing or weaker than before is another. Answers with bytes may leave Last-Modified out.
        """
        if self.tag:
            return later.tag == self.tag
        if self.weak and (later.tag or later.weak) != self.weak:
            return False
        return not (self.modified and later.modified) or self.modified == later.modified

    def joined(self, later: Version) -> Version:
        """Joins marks; its own take precedence."""
        return Version(self.tag or later.tag, self.weak or later.weak, self.modified or later.modified)

    def __str__(self) -> str:
        mark = self.tag.strip(b"\0\1") or (self.weak and b"W/" + self.weak) or self.modified
        return mark.decode("utf-8", "backslashreplace")


NO_VERSION = Version()
"""Of a server that sends no marks."""
