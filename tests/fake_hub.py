"""A hub on loopback that knows enough of the Hugging Face hub's protocol for huggingface_hub to push to it and download from it."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


class Hub:
    """Repositories as {"user/name": {"private", "branches": {branch: {file: bytes}}}}, and the names of files that were asked for."""

    def __init__(self) -> None:
        self.repos: dict[str, Any] = {}
        self.asked: list[str] = []
        self.refuses: int | None = None  # a status that everything is answered with
        self.url = ""

    def files(self, repo: str, branch: str = "main") -> dict[str, bytes]:
        return self.repos[repo]["branches"][branch]

    def commit(self, repo: str, branch: str) -> str:
        return hashlib.sha1(repr(sorted(self.files(repo, branch).items())).encode()).hexdigest()

    def branch(self, repo: str, revision: str) -> str | None:
        """The branch that a name or a commit means."""
        branches = self.repos[repo]["branches"]
        return next((name for name in branches if revision in (name, self.commit(repo, name))), None)


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def reply(self, status: int, body: Any = b"", **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def missing(self, what: str) -> None:
        self.reply(404, {"error": f"{what} not found"}, X_Error_Code=f"{what}NotFound")

    def handle_any(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path).strip("/").split("/")
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if path == [""]:
            return self.reply(200)
        if hub.refuses is not None:
            return self.reply(hub.refuses, {"error": "refused"})
        if path == ["api", "validate-yaml"]:  # of the model card
            return self.reply(200, {"errors": [], "warnings": []})
        if path == ["api", "repos", "create"]:
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            if name in hub.repos:
                return self.reply(409, {"error": "exists", "url": f"{hub.url}/{name}"})
            hub.repos[name] = {"private": asked.get("visibility") == "private", "branches": {"main": {}}}
            return self.reply(200, {"url": f"{hub.url}/{name}"})
        if path[:2] == ["api", "models"]:
            repo, verb, revision = "/".join(path[2:4]), path[4] if len(path) > 4 else "", path[5] if len(path) > 5 else "main"
            return self.missing("Repo") if repo not in hub.repos else self.of_repo(repo, verb, revision, body)
        if len(path) > 4 and path[2] == "resolve":
            return self.download("/".join(path[:2]), path[3], "/".join(path[4:]))
        self.reply(404, {"error": "unknown"})

    do_GET = do_HEAD = do_POST = do_DELETE = handle_any

    def of_repo(self, repo: str, verb: str, revision: str, body: bytes) -> None:
        hub = self.hub
        if verb == "branch":
            if revision in hub.repos[repo]["branches"]:
                return self.reply(409, {"error": "exists"})
            hub.repos[repo]["branches"][revision] = dict(hub.files(repo))
            return self.reply(200, {})
        branch = hub.branch(repo, revision)
        if branch is None:
            return self.missing("Revision")
        files = hub.files(repo, branch)
        if verb in ("", "revision"):
            listed = [{"rfilename": name} for name in sorted(files)]
            about = {"id": repo, "private": hub.repos[repo]["private"], "sha": hub.commit(repo, branch), "siblings": listed}
            return self.reply(200, about)
        if verb == "tree":
            rows = [{"type": "file", "path": n, "size": len(d), "oid": hashlib.sha1(d).hexdigest()} for n, d in files.items()]
            return self.reply(200, rows)
        if verb == "preupload":
            asked = json.loads(body)["files"]
            modes = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None} for f in asked]
            return self.reply(200, {"files": modes})
        assert verb == "commit", verb
        for line in body.splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            elif entry["key"] == "deletedFile":
                del files[entry["value"]["path"]]
        commit = hub.commit(repo, branch)
        self.reply(200, {"commitUrl": f"{hub.url}/{repo}/commit/{commit}", "commitOid": commit})

    def download(self, repo: str, revision: str, name: str) -> None:
        hub = self.hub
        if repo not in hub.repos:
            return self.missing("Repo")
        branch = hub.branch(repo, revision)
        if branch is None:
            return self.missing("Revision")
        hub.asked.append(name)
        data = hub.files(repo, branch).get(name)
        if data is None:
            return self.reply(
                404, {"error": "no such file"}, X_Error_Code="EntryNotFound", X_Repo_Commit=hub.commit(repo, branch)
            )
        self.reply(200, data, ETag=f'"{hashlib.sha1(data).hexdigest()}"', X_Repo_Commit=hub.commit(repo, branch))


@contextmanager
def running() -> Iterator[Hub]:
    """A hub that answers on a free port while the block runs."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("OneHub", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
