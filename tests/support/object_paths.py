"""A file system of `fsspec` over a bucket of these tests, for Orbax's own paths: `gs://` by `GoogleStore`.

Orbax makes, lists and removes directories through `etils.epath`, which needs `gcsfs` for buckets, or TensorFlow.
This has the few methods that it calls, by requests to the server that TensorStore reads and writes, in any process.
"""

import http.client
import io
import json
import os
import sys
import urllib.parse

import fsspec


def install(patched):
    """Has Orbax's paths ask the server of `TENSORSTORE_GCS_HTTP_URL`; `patched` is a `pytest.MonkeyPatch`."""
    from etils.epath import gpath
    from orbax.checkpoint._src.path import gcs_utils

    for name in ("gs", "gcs"):
        patched.setitem(sys.modules["fsspec.registry"]._registry, name, ObjectPaths)
    # Without TensorFlow's file systems and Google's own client, which know no other server.
    patched.setattr(gpath, "_is_tf_installed", lambda: False)
    patched.setattr(gcs_utils, "is_hierarchical_namespace_enabled", lambda path: False)


class ObjectPaths(fsspec.AbstractFileSystem):
    """Paths of a bucket, `bucket`: one request for what is one to Google's server, too."""

    protocol = ("gs", "gcs")
    cachable = False

    @classmethod
    def _strip_protocol(cls, path):
        return str(path).removeprefix("gs://").removeprefix("gcs://").strip("/")

    def key(self, path):
        return self._strip_protocol(path).removeprefix("bucket").lstrip("/")

    def info(self, path, **options):
        key = self.key(path)
        found = _asked("GET", _object(key), alt="json") if key else None
        if found is not None:
            return {"name": f"bucket/{key}", "size": int(json.loads(found)["size"]), "type": "file"}
        if not key or _listed(f"{key}/"):
            return {"name": f"bucket/{key}", "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path, detail=True, **options):
        key = self.key(path)
        below = f"{key}/" if key else ""
        sizes = {name.removeprefix(below): size for name, size in _listed(below).items()}
        names = {name.partition("/")[0] for name in sizes}
        if not names:
            found = [self.info(path)]
        else:
            found = [
                {"name": f"bucket/{below}{name}", "size": sizes.get(name, 0), "type": "file"}
                if name in sizes
                else {"name": f"bucket/{below}{name}", "size": 0, "type": "directory"}
                for name in sorted(names)
                if name
            ]
        return found if detail else [one["name"] for one in found]

    def mkdir(self, path, create_parents=True, **options):
        """Makes the object by which Google's console shows a directory."""
        if key := self.key(path):
            _put(f"{key}/", b"")

    def makedirs(self, path, exist_ok=False):
        if not exist_ok and self.exists(path):
            raise FileExistsError(path)
        self.mkdir(path)

    def rm(self, path, recursive=False, maxdepth=None):
        key = self.key(path)
        removed = [*_listed(f"{key}/")] if recursive else []
        if not removed and _asked("GET", _object(key), alt="json") is None:
            raise FileNotFoundError(path)
        for one in removed or [key]:
            _asked("DELETE", _object(one))

    def mv(self, path1, path2, recursive=False, maxdepth=None, **options):
        old, new = self.key(path1), self.key(path2)
        for one in [*_listed(f"{old}/")] or [old]:
            _put(new + one[len(old) :], _asked("GET", _object(one), alt="media"))
            _asked("DELETE", _object(one))

    rename = mv

    def _open(self, path, mode="rb", **options):
        key = self.key(path)
        data = _asked("GET", _object(key), alt="media") if "w" not in mode else None
        if "r" not in mode:
            return _Written(key, data or b"")
        if data is None:
            raise FileNotFoundError(path)
        return io.BytesIO(data)


class _Written(io.BytesIO):
    """File that is stored when it is closed."""

    def __init__(self, key, data):
        super().__init__(data)
        self.seek(0, io.SEEK_END)
        self._key = key

    def close(self):
        if not self.closed:
            _put(self._key, self.getvalue())
        super().close()


def _object(key):
    return f"/storage/v1/b/bucket/o/{urllib.parse.quote(key, safe='')}"


def _listed(prefix):
    """Sizes of the objects below a prefix, by key."""
    end = prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else ""
    found = json.loads(_asked("GET", "/storage/v1/b/bucket/o", startOffset=prefix, endOffset=end))
    return {one["name"]: int(one["size"]) for one in found["items"]}


def _put(key, data):
    _asked("POST", "/upload/storage/v1/b/bucket/o", data, name=key, uploadType="media")


def _asked(method, path, data=None, **query):
    """The body of an answer; None for what is not stored."""
    server = urllib.parse.urlsplit(os.environ["TENSORSTORE_GCS_HTTP_URL"])
    connection = http.client.HTTPConnection(server.hostname, server.port)
    try:
        connection.request(method, f"{path}?{urllib.parse.urlencode(query)}", data)
        answer = connection.getresponse()
        return answer.read() if answer.status < 300 else None
    finally:
        connection.close()
