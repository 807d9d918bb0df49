"""Stand-ins for the Hugging Face hub: one that sends its files itself, and one that sends on to another server."""

import hashlib
import json

import numpy as np
import safetensors.numpy

from tests.support.http_store import HttpStore

W = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)
B = np.arange(6, dtype=np.float32)


class Hub(HttpStore):
    """The part of the hub's API that `snapshot_download` uses; one commit."""

    commit = "0123456789abcdef0123456789abcdef01234567"
    revisions = ("main", "v1", "refs/pr/3", commit)

    def answer_to(self, name, query):
        parts = name.split("/")
        if parts[:2] == ["api", "models"] and "/".join(parts[2:4]) == "google/tiny":
            return self.describe(parts[4:])
        if parts[2:3] == ["resolve"] and parts[3] in self.revisions and "/".join(parts[:2]) == "google/tiny":
            data = self.files.get("/".join(parts[4:]))
            if data is not None:
                return 200, data, {"X-Repo-Commit": self.commit, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}
            return 404, b"", {"X-Error-Code": "EntryNotFound"}
        return 404, b"{}", {"X-Error-Code": "RepoNotFound"}

    def describe(self, parts):
        if len(parts) >= 2 and "/".join(parts[1:]) not in self.revisions:
            return 404, b"{}", {"X-Error-Code": "RevisionNotFound"}
        if parts[:1] == ["tree"]:
            files = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in self.files.items()
            ]
            return 200, json.dumps(files).encode(), {}
        siblings = [{"rfilename": name} for name in self.files]
        described = {"id": "google/tiny", "modelId": "google/tiny", "sha": self.commit, "siblings": siblings}
        return 200, json.dumps(described).encode(), {}


class Storage(HttpStore):
    """The server to which the hub sends: it answers those who have the signature of the day."""

    signature = "first"

    def answer_to(self, name, query):
        return self.contents(name) if query.get("Signature") == [self.signature] else (403, b"", {})


class RedirectingHub(Hub):
    """Answers for files with redirects, over one of its own to the storage."""

    def __init__(self, storage):
        super().__init__()
        self.storage = storage

    def answer_to(self, name, query):
        is_cached = name.startswith("cached/")
        found = super().answer_to(name.removeprefix("cached/"), query)
        if "/resolve/" not in name or found[0] != 200:
            return found
        headers = {**found[2], "X-Linked-Etag": f'"{hashlib.sha256(found[1]).hexdigest()}"'}
        headers |= {"X-Linked-Size": str(len(found[1])), "Location": f"/cached/{name}"}
        if is_cached:
            file = "/".join(name.split("/")[5:])
            headers["Location"] = f"{self.storage.url}/{file}?Signature={self.storage.signature}"
        return 302 if is_cached else 307, b"", headers


def model(hub):
    """Puts a model of two arrays on a hub."""
    hub.files["model.safetensors"] = safetensors.numpy.save({"w": W, "b": B})
    hub.files["config.json"] = b'{"model_type": "t5"}'
