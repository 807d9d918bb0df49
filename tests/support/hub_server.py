"""Stand-ins for the Hugging Face hub: one that sends its files itself, and one that sends on to another server."""

import base64
import itertools
import json

import numpy as np
import safetensors.numpy

from tests.support.http_store import HttpStore, digest

W = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)
B = np.arange(6, dtype=np.float32)

# No two have the same: what a process knows of a commit would be that of another hub, which had the same port before.
_commits = map("{:040x}".format, itertools.count(0xC0FFEE))


class Hub(HttpStore):
    """The part of the hub's API that `snapshot_download` uses; one commit.

    Attributes:
      has_sizes: whether its list of files has their sizes.
      commit: of `main` and the other `revisions`; each hub has its own.
    """

    has_sizes = False

    def __init__(self, directory=None):
        super().__init__(directory)
        self.commit = next(_commits)
        self.revisions = ("main", "v1", "refs/pr/3", self.commit)

    def answer_to(self, name, query):
        parts = name.split("/")
        if parts[:2] == ["api", "models"] and "/".join(parts[2:4]) == "google/tiny":
            return self.describe(parts[4:])
        if parts[2:3] == ["resolve"] and parts[3] in self.revisions and "/".join(parts[:2]) == "google/tiny":
            data = self.files.get("/".join(parts[4:]))
            if data is not None:
                return 200, data, {"X-Repo-Commit": self.commit, "ETag": f'"{digest(data, "sha1")}"'}
            return 404, b"", {"X-Error-Code": "EntryNotFound"}
        return 404, b"{}", {"X-Error-Code": "RepoNotFound"}

    def describe(self, parts):
        if len(parts) >= 2 and "/".join(parts[1:]) not in self.revisions:
            return 404, b"{}", {"X-Error-Code": "RevisionNotFound"}
        if parts[:1] == ["tree"]:
            files = [
                {"type": "file", "path": name, "size": len(data), "oid": digest(data, "sha1")}
                for name, data in self.files.items()
            ]
            return 200, json.dumps(files).encode(), {}
        siblings = [{"rfilename": name, "size": len(data)} for name, data in self.files.items()]
        if not self.has_sizes:
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
        headers = {**found[2], "X-Linked-Etag": f'"{digest(found[1])}"'}
        headers |= {"X-Linked-Size": str(len(found[1])), "Location": f"/cached/{name}"}
        if is_cached:
            file = "/".join(name.split("/")[5:])
            headers["Location"] = f"{self.storage.url}/{file}?Signature={self.storage.signature}"
        return 302 if is_cached else 307, b"", headers


class WritableHub(Hub):
    """The part of the hub's API that `create_commit` uses: large files are sent aside, then named by a commit.

    Attributes:
      commits: what each commit added and removed, oldest first.
      ignored: names of files that its `.gitignore` leaves out.
    """

    def __init__(self):
        super().__init__()
        self.commits = []
        self.ignored = set()
        self.large = {}
        self.revisions = ("main", self.commit)

    def describe(self, parts):
        if len(parts) >= 2 and "/".join(parts[1:]) not in self.revisions:
            return 404, b"{}", {"X-Error-Code": "RevisionNotFound"}
        if parts[:1] == ["tree"]:
            return super().describe(parts)
        siblings = [{"rfilename": name, "size": len(data)} for name, data in self.files.items()]
        described = {"id": "google/tiny", "sha": self.commit, "siblings": siblings}
        return 200, json.dumps(described).encode(), {}

    def accept(self, method, name, query, body):
        if name.startswith("large/"):
            self.large[name.removeprefix("large/")] = body
            return 200, b"", {}
        lines = [json.loads(line) for line in body.splitlines() if line]
        if name == "google/tiny.git/info/lfs/objects/batch":
            return self.upload_urls(lines[0]["objects"])
        if name.startswith("api/models/google/tiny/preupload/"):
            return self.upload_modes(lines[0]["files"])
        if name == "api/models/google/tiny/commit/main":
            return self.add(lines)
        return 404, b"{}", {"X-Error-Code": "RepoNotFound"}

    def upload_urls(self, objects):
        made = [{**one, "actions": {"upload": {"href": f"{self.url}/large/{one['oid']}"}}} for one in objects]
        headers = {"Content-Type": "application/vnd.git-lfs+json"}
        return 200, json.dumps({"transfer": "basic", "objects": made}).encode(), headers

    def upload_modes(self, files):
        modes = [
            {
                "path": one["path"],
                "uploadMode": "lfs" if one["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": one["path"] in self.ignored,
            }
            for one in files
        ]
        return 200, json.dumps({"files": modes}).encode(), {}

    def add(self, lines):
        header, *operations = lines
        if header["value"].get("parentCommit") not in (None, self.commit):
            return 412, json.dumps({"error": "A commit has happened since."}).encode(), {}
        added, removed = {}, []
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "file":
                added[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                added[value["path"]] = self.large[value["oid"]]
            else:
                removed.append(value["path"])
        for name in removed:
            del self.files[name]
        self.files |= added
        self.commits.append((header["value"]["summary"], set(added), set(removed)))
        self.commit = next(_commits)
        self.revisions = ("main", self.commit)
        made = {"commitUrl": f"{self.url}/google/tiny/commit/{self.commit}", "commitOid": self.commit, "success": True}
        return 200, json.dumps(made).encode(), {}


def model(hub):
    """Puts a model of two arrays on a hub."""
    hub.files["model.safetensors"] = safetensors.numpy.save({"w": W, "b": B})
    hub.files["config.json"] = b'{"model_type": "t5"}'
