"""Replaces a wheel by one with the same files, deflated by Zopfli, which finds smaller streams than zlib's level 9.

Usage: .ci/recompress.py WHEEL
"""

import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import zopfli.zlib


class Streams:
    """The compressor of a member of an archive, as `zipfile` calls it, for contents that are already compressed."""

    def __init__(self, streams: dict[bytes, bytes]):
        self._streams = streams
        self._content = b""

    def compress(self, data: bytes) -> bytes:
        self._content += data
        return b""

    def flush(self) -> bytes:
        # Without zlib's header and checksum, which an archive does not have.
        return self._streams[self._content][2:-4]


def files_of(wheel: Path) -> dict[str, tuple[zipfile.ZipInfo, bytes]]:
    """Returns the entry and the content of each file of a wheel, by name."""
    with zipfile.ZipFile(wheel) as archive:
        return {info.filename: (info, archive.read(info)) for info in archive.infolist()}


def recompress(wheel: Path) -> None:
    """Replaces a wheel by the smaller one, once that has been read back."""
    files = files_of(wheel)
    contents = [content for _, content in files.values()]
    with ThreadPoolExecutor() as pool:
        streams = dict(zip(contents, pool.map(zopfli.zlib.compress, contents), strict=True))
    smaller = wheel.with_suffix(".tmp")
    with (
        mock.patch("zipfile._get_compressor", lambda *_: Streams(streams)),
        zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for info, content in files.values():
            archive.writestr(info, content)
    assert [content for _, content in files_of(smaller).values()] == contents
    smaller.replace(wheel)


if __name__ == "__main__":
    recompress(Path(sys.argv[1]))
