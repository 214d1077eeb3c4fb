"""A server that speaks what an upload needs of the Hugging Face hub's protocol: small files in the commit, large ones
by git-lfs' batch endpoint."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import yaml

from tests.weights.hub_server import Handler, HubServer

TOKEN = "hf_of_ada"


@dataclass
class Repository:
    """private: whether it is.  files: by path, as committed."""

    private: bool = False
    files: dict[str, bytes] = field(default_factory=dict)


@dataclass
class Hub:
    """What the server holds. Its user is `ada`, who may write to her own repositories only.

    Attributes:
        held: Nothing that is sent is answered until it is set.
        refuses_commits: Whether the storage of the repository is full, as the hub says.
    """

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    commits: int = 0
    held: threading.Event | None = None
    released: threading.Event = field(default_factory=threading.Event)
    refuses_commits: bool = False


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub on a free port of this machine."""
    hub = Hub()
    with HubServer(hub, handler=_Uploads) as server:
        hub.url = server.url
        yield hub


class _Uploads(Handler):
    protocol_version = "HTTP/1.0"

    @property
    def state(self) -> Hub:
        hub: Hub = self.server.hub
        return hub

    def do_GET(self) -> None:
        parts = self._parts()
        if parts == ["api", "whoami-v2"]:
            self._who()
        elif parts[:2] == ["api", "models"]:
            self._info("/".join(parts[2:4]))

    def do_PUT(self) -> None:
        content = self._body()
        oid = self._parts()[-1]
        assert hashlib.sha256(content).hexdigest() == oid
        self.state.large[oid] = content
        self._json({})

    def do_POST(self) -> None:
        parts, body = self._parts(), self._body()
        if self.state.held is not None:
            self.state.held.wait(60)
        if parts == ["api", "validate-yaml"]:
            _, front, _ = json.loads(body)["content"].split("---\n", 2)
            self._check(yaml.safe_load(front))
        elif parts == ["api", "repos", "create"]:
            self._create(json.loads(body))
        elif parts[-1] == "batch":
            self._batch(json.loads(body))
        elif parts[4] == "preupload":
            files = [self._mode(file) for file in json.loads(body)["files"]]
            self._json({"files": files})
        elif parts[4] == "commit":
            self._commit("/".join(parts[2:4]), body)

    def _check(self, front: dict[str, Any]) -> None:
        """The hub refuses a licence that is not in its list, of which these are some."""
        named, listed = front.get("license", "mit"), ("apache-2.0", "mit", "openrail++", "other")
        errors = [] if named in listed else [{"message": f'"license" must be one of [{", ".join(listed)}]'}]
        self._json({"errors": errors, "warnings": []}, 400 if errors else 200)

    def _who(self) -> None:
        if self.headers.get("authorization") == f"Bearer {TOKEN}":
            self._json({"name": "ada", "type": "user"})
        else:
            self._json({"error": "Invalid token"}, 401)

    def _info(self, name: str) -> None:
        repository = self.state.repositories.get(name)
        if repository is None:
            self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
            return
        siblings = [{"rfilename": path} for path in (".gitattributes", *repository.files)]
        self._json({"id": name, "private": repository.private, "siblings": siblings, "tags": [], "downloads": 0})

    def _create(self, wanted: dict[str, Any]) -> None:
        if wanted["organization"] != "ada":
            self._json({"error": "You don't have the rights to create a model under this namespace"}, 403)
            return
        name = f"{wanted['organization']}/{wanted['name']}"
        self.state.repositories[name] = Repository(wanted.get("visibility") == "private" or bool(wanted.get("private")))
        self._json({"url": f"{self.state.url}/{name}", "name": name})

    def _mode(self, file: dict[str, Any]) -> dict[str, Any]:
        is_large = file["path"].endswith((".safetensors", ".png"))
        return {"path": file["path"], "uploadMode": "lfs" if is_large else "regular", "shouldIgnore": False}

    def _batch(self, wanted: dict[str, Any]) -> None:
        upload = [
            {**one, "actions": {"upload": {"href": f"{self.state.url}/lfs/{one['oid']}"}}} for one in wanted["objects"]
        ]
        self._json({"transfer": "basic", "objects": upload})

    def _commit(self, name: str, body: bytes) -> None:
        if self.state.refuses_commits:
            self._json({"error": "Private repository storage limit reached"}, 403)
            return
        lines = [json.loads(line) for line in body.splitlines()]
        files = self.state.repositories[name].files
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.state.large[value["oid"]]
        self.state.commits += 1
        self._json({"commitUrl": f"{self.state.url}/{name}/commit/1", "commitOid": "1" * 40})

    def _parts(self) -> list[str]:
        return self.path.partition("?")[0].strip("/").split("/")

    def _body(self) -> bytes:
        if self.headers.get("transfer-encoding") == "chunked":
            content = b""
            while size := int(self.rfile.readline(), 16):
                content += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return content
        return self.rfile.read(int(self.headers.get("content-length", 0)))
