"""A stand-in for Google Cloud Storage, which keeps a log of its requests.

It speaks both of its protocols: JSON, as TensorStore does (objects whole and by range with their generation, their
metadata, and lists), and XML, as obstore does (the same under `/bucket/key`); and it takes uploads, on condition of a
generation too, and removals.
"""

import json
import xml.sax.saxutils

from tests.support.http_store import HttpStore, digest


class GoogleStore(HttpStore):
    """The part of Google Cloud Storage's two protocols that TensorStore and obstore use.

    Attributes:
      operations: kind (LIST, HEAD, GET, PUT, DELETE), key and bytes of the object, of each request.
    """

    def __init__(self, directory=None):
        super().__init__(directory)
        self.operations = []

    @property
    def environment(self):
        """By which TensorStore and obstore find it, without asking Google for a token."""
        account = {"gcs_base_url": self.url, "disable_oauth": True, "client_email": "", "private_key": ""}
        return {
            "GOOGLE_BASE_URL": self.url,
            "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account | {"private_key_id": ""}),
            "TENSORSTORE_GCS_HTTP_URL": self.url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
        }

    def generation(self, data):
        return str(int(digest(data)[:12], 16))

    def answer_to(self, name, query):
        """(status, body, headers), or the contents of a file."""
        if not name.startswith("storage/v1/"):
            return self.answer_in_xml(name, query)
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

    def answer_in_xml(self, name, query):
        """What obstore asks for: an object, or a list of one level or all."""
        _, _, key = name.partition("/")
        if "list-type" not in query:
            self.operations.append(("GET", key, 0))
            return self.files.get(key)
        prefix, delimiter = (query.get(key, [""])[0] for key in ("prefix", "delimiter"))
        self.operations.append(("LIST", prefix, 0))
        names = sorted(key for key in self.files if key.startswith(prefix))
        below = {key: key[len(prefix) :].partition(delimiter)[0] if delimiter else "" for key in names}
        directories = {prefix + part + "/" for key, part in below.items() if part and prefix + part != key}
        contents = "".join(
            f"<Contents><Key>{xml.sax.saxutils.escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>&quot;{digest(self.files[key])[:16]}&quot;</ETag><Size>{len(self.files[key])}</Size></Contents>"
            for key in names
            if not delimiter or prefix + below[key] == key
        )
        prefixes = "".join(f"<CommonPrefixes><Prefix>{one}</Prefix></CommonPrefixes>" for one in sorted(directories))
        return 200, f"<ListBucketResult>{contents}{prefixes}</ListBucketResult>".encode(), {}

    def accept(self, method, name, query, body):
        if not name.startswith(("storage/v1/", "upload/")):
            return self.accept_in_xml(method, name.partition("/")[2], body)
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

    def accept_in_xml(self, method, key, body):
        self.operations.append((method, key, len(body)))
        if method == "DELETE":
            return (404, b"", {}) if self.files.pop(key, None) is None else (204, b"", {})
        self.files[key] = body
        return 200, b"", {"ETag": f'"{digest(body)[:16]}"'}
