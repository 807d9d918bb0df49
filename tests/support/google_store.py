"""A stand-in for Google Cloud Storage, which keeps a log of its requests.

It answers what TensorStore sends: objects whole and by range with their generation, their metadata, and lists. The
emulators on PyPI leave the generation out of the answers that carry bytes, by which a changed file is noticed.
"""

import hashlib
import json

from tests.support.http_store import HttpStore


class GoogleStore(HttpStore):
    """The part of Google Cloud Storage's JSON API that TensorStore's `gcs` driver uses to read."""

    def generation(self, data):
        return str(int(hashlib.sha256(data).hexdigest()[:12], 16))

    def answer_to(self, name, query):
        """(status, body, headers), or the contents of a file."""
        bucket = "storage/v1/b/bucket/o"
        if name == bucket:
            start, end = (query.get(key, [""])[0] for key in ("startOffset", "endOffset"))
            names = sorted(key for key in self.files if key >= start and (not end or key < end))
            items = [{"name": key, "generation": self.generation(self.files[key])} for key in names]
            return 200, json.dumps({"kind": "storage#objects", "items": items}).encode(), {}
        data = self.files.get(name.removeprefix(f"{bucket}/"))
        if data is None:
            return 404, b"{}", {}
        if query.get("alt") == ["json"]:
            metadata = {"name": name, "generation": self.generation(data), "size": str(len(data))}
            return 200, json.dumps(metadata).encode(), {}
        return data
