"""A Hugging Face hub on this machine: API, downloads that redirect to a second port with a signature, and faults.

It answers `snapshot_download` of huggingface_hub too. The second port plays the storage hosts of the hub: it honours
ranges, wants a signature that has not run out, and refuses every request that brings a token.
"""

import hashlib
import json
import os
import re
import socket
import struct
import threading
import time
from dataclasses import dataclass
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit

REPO = "HuggingFaceFW/fineweb-edu"


@dataclass
class Fault:
    """For the next `times` requests to `side` whose path holds `match`, after `skip` of them: what happens instead of
    the right answer.

    status: answer that, with Retry-After when given. sleep: wait that long first. cut: close the connection after so
    many bytes of the body, or wait there for `sleep` seconds. reset: close it before the answer's head.
    """

    side: str = "cdn"
    match: str = ""
    times: int = 1
    skip: int = 0
    status: int | None = None
    retry_after: str | None = None
    sleep: float = 0.0
    cut: int | None = None
    reset: bool = False


@dataclass
class Request:
    side: str
    method: str
    path: str
    range: str | None
    token: str | None
    port: int  # of the client, one for each connection
    status: int = 0
    sent: int = 0


class HubServer:
    """Serves the folder as the repository's branch `main`. Use it with `with`."""

    def __init__(self, folder, token=None, page=1000, repo=REPO):
        self.folder = Path(folder)
        self.repo = repo
        self.token = token
        self.page = page
        self.lifetime_s = 3600.0  # of a signature
        self.time = time.time
        self.link_base = None  # where links to further pages lead; a mirror of the hub passes on the hub's own
        self.log: list[Request] = []
        self.faults: list[Fault] = []
        self.commits: dict[str, dict[str, bytes]] = {}
        self.branches: dict[str, str] = {}
        self.stopped = threading.Event()
        self._key = 0
        self._lock = threading.Lock()
        self.commit()

    def __enter__(self):
        self._servers = [_Server(("127.0.0.1", 0), handler) for handler in (_HubHandler, _CdnHandler)]
        self.endpoint, self.cdn = (f"http://127.0.0.1:{server.server_port}" for server in self._servers)
        for server in self._servers:
            server.hub = self
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.stopped.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def commit(self):
        """What the folder holds now becomes the newest commit of main; older ones stay."""
        files = {p.relative_to(self.folder).as_posix(): p.read_bytes() for p in self.folder.rglob("*") if p.is_file()}
        sha = hashlib.sha1(repr(sorted((n, hashlib.sha1(d).digest()) for n, d in files.items())).encode()).hexdigest()
        self.commits[sha] = files
        self.branches["main"] = sha
        return sha

    def fault(self, **kwargs):
        self.faults.append(Fault(**kwargs))

    def expire(self):
        """Every signature given so far is refused from now on."""
        self._key += 1

    def requests(self, side=None, match=""):
        return [r for r in self.log if side in (None, r.side) and match in r.path]

    def signature(self, path, expires):
        return hashlib.sha256(f"{self._key} {path} {expires}".encode()).hexdigest()[:20]

    def take_fault(self, side, path):
        with self._lock:
            for fault in self.faults:
                if fault.times > 0 and fault.side == side and fault.match in path:
                    if fault.skip > 0:
                        fault.skip -= 1
                        continue
                    fault.times -= 1
                    return fault
        return Fault()


def download(server, home, include=("sample/10BT/*",)):
    """As `hf download ... --include "sample/10BT/*"` does it, with `home` as HF_HOME; the folder of the snapshot."""
    from huggingface_hub import snapshot_download

    from nsa.data.sources import hub

    wanted = {"cache_dir": home / "hub", "allow_patterns": list(include), "endpoint": server.endpoint, "token": False}
    for attempt in range(5):
        try:
            return snapshot_download(server.repo, repo_type="dataset", **wanted)
        except hub.httpx.HTTPError:  # a thread of an earlier test whose server is gone closes the shared client
            if attempt == 4:
                raise
    raise AssertionError


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    hub: HubServer

    def handle_error(self, request, client_address):
        """Clients that go away are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are two writes: the second would wait 40 ms for the first's receipt
    side = ""

    def log_message(self, *_):
        pass

    def handle_one(self):
        hub = self.server.hub
        self.request_log = Request(
            self.side,
            self.command,
            self.path,
            self.headers["Range"],
            self.headers["Authorization"],
            self.client_address[1],
        )
        hub.log.append(self.request_log)
        self.form = self.rfile.read(int(self.headers["Content-Length"] or 0)).decode()
        self.fault = hub.take_fault(self.side, unquote(self.path))
        if self.fault.sleep and self.fault.cut is None:
            hub.stopped.wait(self.fault.sleep)
        if self.fault.reset:
            self.request_log.status = -1
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(self.connection.detach())
            self.close_connection = True
        elif self.fault.status is not None:
            wait = {"Retry-After": self.fault.retry_after} if self.fault.retry_after is not None else {}
            self.answer(self.fault.status, b"a fault", wait)
        else:
            self.respond(hub)

    do_GET = do_HEAD = do_POST = handle_one

    def answer(self, status, body=b"", headers=(), content_type="application/json; charset=utf-8"):
        self.request_log.status = status
        self.send_response(status)
        for name, value in {"Content-Type": content_type, "Content-Length": len(body), **dict(headers)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = self.fault.cut
        self.request_log.sent = len(body[:cut])  # before the client can look
        self.wfile.write(body[:cut])
        if cut is not None:
            self.server.hub.stopped.wait(self.fault.sleep)
            self.close_connection = True

    def error(self, status, code, message):
        headers = {"X-Error-Code": code, "X-Error-Message": message}
        self.answer(status, json.dumps({"error": message}).encode(), headers)


class _HubHandler(_Handler):
    side = "hub"

    def respond(self, hub):
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        if hub.token is not None and self.headers["Authorization"] != f"Bearer {hub.token}":
            self.error(401, "RepoNotFound", "Invalid username or password.")
        elif call := re.fullmatch(rf"/api/datasets/{hub.repo}(?:/(revision|tree|paths-info)/([^/]+)/?(.*))?", path):
            self.api(hub, call[1] or "revision", call[2] or "main", call[3], parse_qs(parts.query))
        elif file := re.fullmatch(rf"/datasets/{hub.repo}/resolve/([^/]+)/(.+)", path):
            self.resolve(hub, file[1], file[2])
        else:
            self.error(404, "RepoNotFound", "Repository not found")

    def api(self, hub, call, revision, folder, query):
        commit = hub.branches.get(revision, revision)
        if commit not in hub.commits:
            self.error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return
        files = hub.commits[commit]
        if call == "revision":
            siblings = [{"rfilename": name} for name in sorted(files)]
            info = {"_id": "1", "id": hub.repo, "sha": commit, "private": False, "gated": False, "siblings": siblings}
            self.answer(200, json.dumps(info).encode())
            return
        if call == "paths-info":
            wanted = parse_qs(self.form)["paths"]
            self.answer(200, json.dumps([i for i in _tree(files, "", recursive=True) if i["path"] in wanted]).encode())
            return
        items = _tree(files, folder, recursive=query.get("recursive", ["false"])[0].lower() == "true")
        if not items:
            self.error(404, "EntryNotFound", f"{folder} does not exist on {revision}")
            return
        start = int(query.get("cursor", ["0"])[0])
        headers = {}
        if start + hub.page < len(items):
            following = {**{k: v[0] for k, v in query.items()}, "cursor": start + hub.page}
            link = f"{hub.link_base or hub.endpoint}{urlsplit(self.path).path}?{urlencode(following)}"
            headers["Link"] = f'<{link}>; rel="next"'
        self.answer(200, json.dumps(items[start : start + hub.page]).encode(), headers)

    def resolve(self, hub, revision, name):
        commit = hub.branches.get(revision, revision)
        if commit not in hub.commits:
            self.error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return
        if name not in hub.commits[commit]:
            self.error(404, "EntryNotFound", "Entry not found")
            return
        data = hub.commits[commit][name]
        path, expires = f"/{commit}/{quote(name)}", f"{hub.time() + hub.lifetime_s:.3f}"
        signed = urlencode({"Expires": expires, "Signature": hub.signature(unquote(path), expires)})
        headers = {
            "X-Repo-Commit": commit,
            "X-Linked-Size": len(data),
            "X-Linked-Etag": f'"{hashlib.sha256(data).hexdigest()}"',
            "ETag": f'"{hashlib.sha1(data).hexdigest()}"',
            "Accept-Ranges": "bytes",
            "Location": f"{hub.cdn}{path}?{signed}",
        }
        self.answer(302, b"Found. Redirecting", headers, "text/plain; charset=utf-8")


class _CdnHandler(_Handler):
    side = "cdn"

    def respond(self, hub):
        parts = urlsplit(self.path)
        query = parse_qs(parts.query)
        commit, name = unquote(parts.path)[1:].split("/", 1)
        expires = query.get("Expires", ["0"])[0]
        if self.headers["Authorization"] is not None:
            self.answer(400, b"Only one auth mechanism allowed")
        elif query.get("Signature") != [hub.signature(unquote(parts.path), expires)] or hub.time() > float(expires):
            self.answer(403, b"<Error><Code>AccessDenied</Code></Error>", content_type="application/xml")
        else:
            self.send_part(hub.commits[commit][name])

    def send_part(self, data):
        headers = {"Accept-Ranges": "bytes", "ETag": f'"{hashlib.sha1(data).hexdigest()}"', "Date": formatdate()}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["Range"] or "")
        if wanted is None:
            self.answer(200, data, headers, "application/octet-stream")
            return
        start, stop = int(wanted[1]), min(len(data), int(wanted[2] or len(data)) + 1)
        if start >= stop:
            self.answer(416, b"", {"Content-Range": f"bytes */{len(data)}"})
            return
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        self.answer(206, data[start:stop], headers, "application/octet-stream")


def _tree(files, folder, *, recursive):
    """What the tree call lists of a folder: files with size and content id, folders with none."""
    prefix = f"{folder}/" if folder else ""
    items = {}
    for name, data in files.items():
        if not name.startswith(prefix):
            continue
        parts = name[len(prefix) :].split("/")
        for depth in range(1, len(parts)):
            path = prefix + "/".join(parts[:depth])
            if recursive or depth == 1:
                oid = hashlib.sha1(path.encode()).hexdigest()
                items[path] = {"type": "directory", "oid": oid, "size": 0, "path": path}
        if recursive or len(parts) == 1:
            oid = {"oid": hashlib.sha1(data).hexdigest(), "size": len(data), "path": name}
            lfs = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 135}
            items[name] = {"type": "file", **oid, **({"lfs": lfs} if name.endswith(".parquet") else {})}
    return [items[path] for path in sorted(items)]
