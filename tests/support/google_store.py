"""A stand-in for Google Cloud Storage, which keeps a log of its requests.

It answers what TensorStore sends: objects whole and by range with their generation, their metadata, and lists; and it
takes uploads, on condition of a generation too, and removals. The
emulators on PyPI leave the generation out of the answers that carry bytes, by which a changed file is noticed.
"""

import json

from tests.support.http_store import HttpStore, digest


class GoogleStore(HttpStore):
    """The part of Google Cloud Storage's JSON API that TensorStore's `gcs` driver uses.

    Attributes:
      operations: kind (LIST, HEAD, GET, PUT, DELETE), key and bytes of the object, of each request.
    """

    def __init__(self, directory=None):
        super().__init__(directory)
        self.operations = []

    def generation(self, data):
        return str(int(digest(data)[:12], 16))

    def answer_to(self, name, query):
        """(status, body, headers), or the contents of a file."""
        bucket = "storage/v1/b/bucket/o"
        if name == bucket:
            start, end = (query.get(key, [""])[0] for key in ("startOffset", "endOffset"))
            names = sorted(key for key in self.files if key >= start and (not end or key < end))
            items = [
                {"name": key, "generation": self.generation(self.files[key]), "size": str(len(self.files[key]))}
                for key in names
            ]
            self.operations.append(("LIST", start, 0))
            return 200, json.dumps({"kind": "storage#objects", "items": items}).encode(), {}
        key = name.removeprefix(f"{bucket}/")
        data = self.files.get(key)
        is_head = query.get("alt") == ["json"]
        self.operations.append(("HEAD" if is_head else "GET", key, 0 if is_head else len(data or b"")))
        if data is None:
            return 404, b"{}", {}
        if is_head:
            metadata = {"name": name, "generation": self.generation(data), "size": str(len(data))}
            return 200, json.dumps(metadata).encode(), {}
        return data

    def accept(self, method, name, query, body):
        upload = "upload/storage/v1/b/bucket/o"
        key = query["name"][0] if name == upload else name.removeprefix("storage/v1/b/bucket/o/")
        self.operations.append(("DELETE" if method == "DELETE" else "PUT", key, len(body)))
        there = self.files.get(key)
        wanted = query.get("ifGenerationMatch")
        if wanted is not None and wanted != ["0" if there is None else self.generation(there)]:
            return 412, b"{}", {}
        if method == "DELETE":
            return (404, b"{}", {}) if self.files.pop(key, None) is None else (204, b"", {})
        self.files[key] = body
        metadata = {"name": key, "generation": self.generation(body), "size": str(len(body))}
        return 200, json.dumps(metadata).encode(), {}
