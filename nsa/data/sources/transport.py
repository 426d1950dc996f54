"""GET requests with time limits over kept connections, and operations that are tried again until a deadline.

A time limit covers connecting, the answer's head and each chunk of its body, so that nothing waits for ever.
HTTP_PROXY, HTTPS_PROXY and NO_PROXY are obeyed. Everything here may be used by several threads at once.
"""

import base64
import http.client
import os
import random
import re
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.message import Message
from email.utils import parsedate_to_datetime
from functools import cache
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from nsa.errors import DataError, DataUnavailableError

T = TypeVar("T")
Origin = tuple[str, str, int]

ATTEMPT_S = 15.0  # up to the first chunk, and for every further one; a third of the deadline at most
LAST_ATTEMPT_S = 1.0  # for the attempt that is made when the deadline is reached
BACKOFF_FIRST_S = 0.5  # doubles with every failure
BACKOFF_MAX_S = 20.0
CHUNK_BYTES = 256 << 10
SLOW_S = 2.0  # what takes longer is worth a word to who waits
IDLE_S = 20.0  # servers close connections that idle longer
NO_ANSWER = "no answer yet"

_jitter = random.Random()  # noqa: S311  (no secret, and apart from the generator that user code may have seeded)


class Failure(Exception):  # noqa: N818  (caught by `Attempts`, never seen by a user)
    """An attempt that failed in a way that may pass; the server asks to wait `retry_after` seconds."""

    def __init__(self, what: str, retry_after: float = 0.0):
        super().__init__(what)
        self.retry_after = retry_after


@dataclass
class Wait:
    """An operation under way: since when it waits for a success, and what happened last."""

    what: str
    deadline_s: float
    since: float = field(default_factory=time.monotonic)
    tries: int = 0
    last: str = NO_ANSWER
    given_up: threading.Event = field(default_factory=threading.Event)

    def progress(self) -> None:
        """Something arrived and is kept: the deadline and the back-off start again."""
        self.since, self.tries, self.last = time.monotonic(), 1, NO_ANSWER

    def left(self) -> float:
        return self.since + self.deadline_s - time.monotonic()

    def limit(self) -> float:
        """Seconds that the attempt under way may take for its next chunk."""
        third = self.deadline_s / 3
        return max(min(LAST_ATTEMPT_S, third), min(ATTEMPT_S, third, self.left()))

    def __str__(self) -> str:
        return f"{self.what}: try {self.tries}, {time.monotonic() - self.since:.0f} s, last: {self.last}"


class Attempts:
    """Runs operations again and again until they succeed or had none for `deadline_s`. `origin` is for messages."""

    def __init__(self, origin: str, deadline_s: float):
        self.origin = origin
        self.deadline_s = deadline_s
        self._waits: dict[int, Wait] = {}
        self._lock = threading.Lock()

    def run(self, what: str, attempt: Callable[[Wait], T]) -> T:
        """What the first successful attempt returns. Failures that cannot pass are a `DataError` at once."""
        wait = Wait(what, self.deadline_s)
        with self._lock:
            self._waits[id(wait)] = wait
        try:
            while True:
                wait.tries += 1
                try:
                    return attempt(wait)
                except ssl.SSLCertVerificationError as error:
                    raise DataError(
                        f"{what}: the server's certificate is refused: {error.verify_message}; "
                        "set SSL_CERT_FILE to a file with your network's certificates"
                    ) from None
                except (Failure, OSError, http.client.HTTPException) as error:
                    wait.last = _describe(error)
                    asked_for = error.retry_after if isinstance(error, Failure) else 0.0
                if wait.left() <= 0 or wait.given_up.is_set():
                    raise DataUnavailableError(
                        f"{what}: not available from {self.origin} for {time.monotonic() - wait.since:.1f} s, "
                        f"{wait.tries} tries, last: {wait.last}; check the network, allow more time with "
                        "data.first_batch_s (up to a run's first batch) or data.timeout_s (everywhere else), or set "
                        "data.paths to a local mirror"
                    )
                backoff = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2.0 ** min(wait.tries - 1, 20))
                wait.given_up.wait(min(max(backoff * _jitter.uniform(0.5, 1.0), asked_for), wait.left()))
        finally:
            with self._lock:
                del self._waits[id(wait)]

    def give_up(self) -> None:
        """Operations under way end with the attempt they are at."""
        with self._lock:
            for wait in self._waits.values():
                wait.given_up.set()

    def waiting_for(self) -> str | None:
        """The operation that waits longest, if one failed before or is slow."""
        with self._lock:
            waits = [w for w in self._waits.values() if w.tries > 1 or time.monotonic() - w.since > SLOW_S]
        return str(min(waits, key=lambda w: w.since)) if waits else None


@dataclass
class Answer:
    """An answer whose body is still to be read."""

    url: str
    connection: http.client.HTTPConnection
    response: http.client.HTTPResponse
    sock: socket.socket

    def receive(self, buffer: bytearray, size: int, limit: float, progress: Callable[[], None]) -> bool:
        """Appends to the buffer until it holds `size` bytes; False when the body ends before."""
        while len(buffer) < size:
            stop, chunk = time.monotonic() + limit, min(size, len(buffer) + CHUNK_BYTES)
            while len(buffer) < chunk:
                # A socket's time limit is that of one read: here many slow ones add up to one chunk.
                self.sock.settimeout(remaining(stop))
                piece = self.response.read1(chunk - len(buffer))
                if not piece:
                    return False
                buffer += piece
            progress()
        return True


class Connections:
    """Connections that wait for their next request, by process (after a fork) and origin."""

    def __init__(self) -> None:
        self._idle: dict[tuple[int, Origin], list[tuple[float, http.client.HTTPConnection]]] = {}
        self._lock = threading.Lock()

    def get(self, url: str, headers: Mapping[str, str], stop: float) -> Answer:
        """The answer's head, before `time.monotonic()` is `stop`. Hand the answer back with `give_back`."""
        proxy = _proxy(*origin_of(url))
        parts = urlsplit(url)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        if proxy is not None and parts.scheme == "http":
            target, headers = url, {**headers, **proxy[2]}
        while True:
            connection = self._take(origin_of(url))
            reused = connection is not None
            connection = connection or _connection(origin_of(url), proxy)
            try:
                connection.timeout = remaining(stop)
                if connection.sock is not None:
                    connection.sock.settimeout(connection.timeout)
                connection.request("GET", target, headers=dict(headers))
                sock = connection.sock  # getresponse() lets go of it when the server will close
                sock.settimeout(remaining(stop))
                return Answer(url, connection, connection.getresponse(), sock)
            except ConnectionError:
                connection.close()
                # That an idle connection was closed says nothing about the server.
                if not reused:
                    raise
            except BaseException:
                connection.close()
                raise

    def give_back(self, answer: Answer) -> None:
        """Keeps the connection when its answer was read to the end, closes it otherwise."""
        response = answer.response
        whole = response.length == 0 if response.length is not None else response.isclosed()
        response.close()
        if not whole or response.will_close:
            answer.connection.close()
            return
        with self._lock:
            key = (os.getpid(), origin_of(answer.url))
            self._idle.setdefault(key, []).append((time.monotonic(), answer.connection))

    def _take(self, origin: Origin) -> http.client.HTTPConnection | None:
        with self._lock:
            idle = self._idle.get((os.getpid(), origin), [])
            while idle:
                since, connection = idle.pop()
                if time.monotonic() - since < IDLE_S:
                    return connection
                connection.close()
        return None


def _connection(origin: Origin, proxy: tuple[str, int, dict[str, str]] | None) -> http.client.HTTPConnection:
    scheme, host, port = origin
    through = (host, port) if proxy is None else proxy[:2]
    if scheme == "http":
        return http.client.HTTPConnection(*through)
    secure = http.client.HTTPSConnection(*through, context=_tls())
    if proxy is not None:
        secure.set_tunnel(host, port, headers=proxy[2])
    return secure


def origin_of(url: str) -> Origin:
    """Scheme, host and port: what a token and a connection belong to."""
    parts = urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        port = 0
    if parts.scheme not in ("http", "https") or not parts.hostname or not port:
        raise Failure(f"{url[:80]!r} is no web address")
    return parts.scheme, parts.hostname, port


def _proxy(scheme: str, host: str, port: int) -> tuple[str, int, dict[str, str]] | None:
    """Host, port and credentials of the proxy for an origin."""
    url = urllib.request.getproxies().get(scheme)
    if not url or urllib.request.proxy_bypass(f"{host}:{port}"):
        return None
    parts = urlsplit(url if "//" in url else f"//{url}")
    if not parts.username:
        return parts.hostname or "", parts.port or 80, {}
    login = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
    return parts.hostname or "", parts.port or 80, {"Proxy-Authorization": f"Basic {base64.b64encode(login).decode()}"}


@cache
def _tls() -> ssl.SSLContext:
    context = ssl.create_default_context()
    try:  # beside the system's certificates: a slim container has none
        import certifi

        context.load_verify_locations(certifi.where())
    except (ImportError, OSError):
        pass
    return context


def remaining(stop: float) -> float:
    """Seconds until `time.monotonic()` is `stop`; a TimeoutError when it is."""
    left = stop - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def retry_after(headers: Message) -> float:
    """Seconds that a server asks to wait: a number, a date, or when its rate limit starts anew; 0 for no word."""
    if limit := re.search(r"\br\s*=\s*0\s*;\s*t\s*=\s*(\d+)", headers.get("RateLimit", "")):
        return float(limit[1])
    value = headers.get("Retry-After", "").strip()
    if value.isdigit():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time()) if value else 0.0
    except ValueError:
        return 0.0


def _describe(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, ConnectionError | http.client.IncompleteRead):
        return "the connection was cut"
    if isinstance(error, socket.gaierror):
        return f"host name not found ({error.strerror})"
    return str(error) or type(error).__name__
