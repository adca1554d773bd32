"""A small Hugging Face hub on loopback: enough of its interface for huggingface_hub to list and download.

    with LoopbackHub() as hub:
        hub.add_model("owner/name", {"config.json": b"{}"})
        resolve_model("owner/name", endpoint=hub.endpoint, cache_dir=tmp_path)

Each `add_…` makes a commit on a branch; older commits stay readable. `cut_once[path] = n` breaks the next
download of a file after n bytes, as a lost connection does.
"""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class Repo:
    """A repository: commits by hash, refs by name, and who may read it."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    token: str | None = None
    gated: bool = False


@dataclass(frozen=True)
class Seen:
    """A request that the server received."""

    method: str
    path: str
    range: str | None
    authorization: str | None


class LoopbackHub:
    """The server; use it as a context manager. `endpoint` is its address, `requests` lists the requests."""

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], Repo] = {}
        self.requests: list[Seen] = []
        self.cut_once: dict[str, int] = {}
        self.status_for_all: int | None = None
        hub = self

        class Handler(_Handler):
            server_hub = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> LoopbackHub:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop answering; the address then refuses connections."""
        self._server.shutdown()
        self._server.server_close()

    def add_model(self, repo_id: str, files: dict[str, bytes | str], **options) -> str:
        """Commit files to a model; the commit's hash. Options: branch, token (makes it private), gated."""
        return self._add("models", repo_id, files, **options)

    def add_dataset(self, repo_id: str, files: dict[str, bytes | str], **options) -> str:
        """Commit files to a dataset; the commit's hash."""
        return self._add("datasets", repo_id, files, **options)

    def tag(self, kind: str, repo_id: str, name: str, commit: str) -> None:
        """Tag a commit of "models" or "datasets"."""
        self.repos[kind, repo_id].refs[name] = commit

    def fetched(self) -> set[str]:
        """Names of the downloaded files."""
        return {
            s.path.split("/resolve/")[1].split("/", 1)[1]
            for s in self.requests
            if s.method == "GET" and "/resolve/" in s.path
        }

    def _add(
        self,
        kind: str,
        repo_id: str,
        files: dict[str, bytes | str],
        *,
        branch: str = "main",
        token: str | None = None,
        gated: bool = False,
    ) -> str:
        repo = self.repos.setdefault((kind, repo_id), Repo())
        content = {name: data.encode() if isinstance(data, str) else data for name, data in files.items()}
        seed = json.dumps([repo_id, {n: hashlib.sha1(d).hexdigest() for n, d in content.items()}, branch])
        commit = hashlib.sha1(seed.encode()).hexdigest()
        repo.commits[commit] = content
        repo.refs[branch] = commit
        repo.token, repo.gated = token, gated
        return commit


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_hub: LoopbackHub

    def log_message(self, *_: object) -> None:
        """No log output in tests."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        hub = self.server_hub
        hub.requests.append(
            Seen(self.command, path, self.headers.get("Range"), self.headers.get("Authorization"))
        )
        if hub.status_for_all is not None:
            self._fail(hub.status_for_all, "")
        elif path.startswith("/api/"):
            self._api(path.removeprefix("/api/"))
        elif "/resolve/" in path:
            self._file(path.lstrip("/"))
        else:
            self._fail(404, "RepoNotFound")

    def _open(self, kind: str, repo_id: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """(commit, files), or None after an error was sent."""
        repo = self.server_hub.repos.get((kind, repo_id))
        sent = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if repo is None or (repo.token is not None and not repo.gated and sent != repo.token):
            self._fail(404 if sent else 401, "RepoNotFound")
        elif repo.gated and sent != repo.token:
            self._fail(403 if sent else 401, "GatedRepo")
        elif (commit := repo.refs.get(revision, revision)) not in repo.commits:
            self._fail(404, "RevisionNotFound")
        else:
            return commit, repo.commits[commit]
        return None

    def _api(self, rest: str) -> None:
        kind, rest = rest.split("/", 1)
        for verb in ("/revision/", "/tree/"):
            if verb in rest:
                repo_id, revision = rest.split(verb, 1)
                break
        else:
            repo_id, verb, revision = rest, "/revision/", "main"
        opened = self._open(kind, repo_id, revision)
        if opened is None:
            return
        commit, files = opened
        body: object = {"id": repo_id, "sha": commit, "siblings": [{"rfilename": n} for n in files]}
        if verb == "/tree/":
            body = [
                {"type": "file", "path": n, "size": len(d), "oid": hashlib.sha1(d).hexdigest()}
                for n, d in files.items()
            ]
        self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _file(self, path: str) -> None:
        kind = "datasets" if path.startswith("datasets/") else "models"
        repo_id, rest = path.removeprefix("datasets/").split("/resolve/", 1)
        revision, name = rest.split("/", 1)
        opened = self._open(kind, repo_id, revision)
        if opened is None:
            return
        commit, files = opened
        if name not in files:
            self._fail(404, "EntryNotFound")
            return
        data, status = files[name], 200
        headers = {
            "ETag": f'"{hashlib.sha1(data).hexdigest()}"',
            "X-Repo-Commit": commit,
            "Accept-Ranges": "bytes",
        }
        asked = self.headers.get("Range")
        if asked is not None:
            start = int(asked.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            data, status = data[start:], 206
        cut = self.server_hub.cut_once.pop(name, None) if self.command == "GET" else None
        self._send(status, data, headers, cut=cut)

    def _fail(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code} if code else {})

    def _send(self, status: int, data: bytes, headers: dict[str, str], cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data if cut is None else data[:cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True
            self.connection.close()
