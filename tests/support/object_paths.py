"""A file system of `fsspec` over a bucket of these tests, for Orbax's own paths: `gs://` by `GoogleStore`.

Orbax makes, lists and removes directories through `etils.epath`, which needs `gcsfs` for buckets, or TensorFlow.
This has the few methods that it calls, over the same objects that TensorStore reads and writes.
"""

import io
from typing import ClassVar

import fsspec


class ObjectPaths(fsspec.AbstractFileSystem):
    """Paths of a bucket.

    Attributes:
      files: contents by key; of the bucket `bucket`.
    """

    protocol = ("gs", "gcs")
    cachable = False
    files: ClassVar = {}

    @classmethod
    def _strip_protocol(cls, path):
        return str(path).removeprefix("gs://").removeprefix("gcs://").strip("/")

    def key(self, path):
        return self._strip_protocol(path).removeprefix("bucket").lstrip("/")

    def info(self, path, **options):
        key = self.key(path)
        if key in self.files:
            return {"name": f"bucket/{key}", "size": len(self.files[key]), "type": "file"}
        if not key or any(one.startswith(f"{key}/") for one in self.files):
            return {"name": f"bucket/{key}", "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path, detail=True, **options):
        key = self.key(path)
        below = f"{key}/" if key else ""
        names = sorted({one.removeprefix(below).partition("/")[0] for one in list(self.files) if one.startswith(below)})
        if not names:
            if key in self.files:
                names, below = [key], ""
            else:
                raise FileNotFoundError(path)
        found = [self.info(f"bucket/{below}{name}") for name in names if name]
        return found if detail else [one["name"] for one in found]

    def mkdir(self, path, create_parents=True, **options):
        """Makes the object by which Google's console shows a directory."""
        if key := self.key(path):
            self.files[f"{key}/"] = b""

    def makedirs(self, path, exist_ok=False):
        if self.exists(path) and not exist_ok:
            raise FileExistsError(path)
        self.mkdir(path)

    def rm(self, path, recursive=False, maxdepth=None):
        key = self.key(path)
        if not self.exists(path):
            raise FileNotFoundError(path)
        for one in [one for one in self.files if one == key or one.startswith(f"{key}/")]:
            del self.files[one]

    def mv(self, path1, path2, recursive=False, maxdepth=None, **options):
        old, new = self.key(path1), self.key(path2)
        for one in [one for one in self.files if one == old or one.startswith(f"{old}/")]:
            self.files[new + one[len(old) :]] = self.files.pop(one)

    rename = mv

    def _open(self, path, mode="rb", **options):
        key = self.key(path)
        if "r" in mode:
            if key not in self.files:
                raise FileNotFoundError(path)
            return io.BytesIO(self.files[key])
        return _Written(self.files, key, self.files.get(key, b"") if "a" in mode else b"")


class _Written(io.BytesIO):
    """File that is stored when it is closed."""

    def __init__(self, files, key, data):
        super().__init__(data)
        self.seek(0, io.SEEK_END)
        self._files, self._key = files, key

    def close(self):
        if not self.closed:
            self._files[self._key] = self.getvalue()
        super().close()
