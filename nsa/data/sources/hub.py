"""Requests to the Hugging Face hub about one dataset repository: whole answers, and byte ranges of its files.

huggingface_hub provides the token, the local cache and the HTTP client (httpx), which does connections, proxies and
TLS. The retry loop is written here because that library cannot keep a deadline: its listing waits without a timeout,
and its retries sleep for 23 s or for whatever a Retry-After says. The token is sent to the endpoint alone, never to
the hosts it redirects to.
"""

import os
import random
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar

import huggingface_hub
import huggingface_hub.constants

from nsa.errors import DataError, DataUnavailableError, reworded

try:
    import httpx2 as httpx
except ImportError:  # before version 2 huggingface_hub brought it under its older name
    import httpx  # type: ignore[import-not-found, no-redef]

T = TypeVar("T")

DEFAULT_ENDPOINT = "https://huggingface.co"
MAX_REDIRECTS = 5
MAX_BODY_BYTES = 64 << 20  # of a README, or of one page of a listing; a thousand files are 0.3 MB
CHUNK_BYTES = 256 << 10  # what has to arrive within the timeout of an attempt
ATTEMPT_S = 15.0  # timeout up to the first chunk, and for every further one; a third of the deadline at most
LAST_ATTEMPT_S = 1.0  # for the attempt that is made when the deadline is reached
BACKOFF_FIRST_S = 0.5  # doubles with every failure
BACKOFF_MAX_S = 20.0
SLOW_S = 2.0  # operations that take longer are reported
IDLE_S = 20.0  # servers close connections that idle longer
NO_ANSWER = "no answer yet"

_now = time.monotonic
_jitter = random.Random()  # noqa: S311  (no secret, and apart from the generator that user code may have seeded)


class _Failure(Exception):  # noqa: N818  (caught by the retry loop, never seen by a user)
    """An attempt failed in a way that may pass; the server asks to wait `retry_after` seconds."""

    def __init__(self, what: str, retry_after: float = 0.0):
        super().__init__(what)
        self.retry_after = retry_after


@dataclass(eq=False)
class _Operation:
    """A request that is retried: when it last made progress, and how the last attempt failed."""

    what: str
    deadline_s: float
    since: float = field(default_factory=lambda: _now())
    tries: int = 0
    last: str = NO_ANSWER

    def progress(self) -> None:
        """Something arrived and is kept: the deadline and the backoff start again."""
        self.since, self.tries, self.last = _now(), 1, NO_ANSWER

    def left(self) -> float:
        return self.since + self.deadline_s - _now()

    def timeout(self) -> float:
        """Seconds that the current attempt may take for its next chunk."""
        third = self.deadline_s / 3
        return max(min(LAST_ATTEMPT_S, third), min(ATTEMPT_S, third, self.left()))

    def backoff(self, retry_after: float) -> float:
        """Seconds until the next attempt: at the latest when the deadline is reached."""
        backoff = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2.0 ** min(self.tries - 1, 20))
        return min(max(backoff * _jitter.uniform(0.5, 1.0), retry_after), self.left())

    def __str__(self) -> str:
        return f"{self.what}: try {self.tries}, {_now() - self.since:.0f} s, last: {self.last}"


class Hub:
    """Asks about one dataset repository until a request succeeds, or until its deadline. Thread-safe; a pickled copy
    opens its own connections."""

    def __init__(self, repo: str, deadline_s: float, endpoint: str | None = None):
        self.repo = repo
        self.deadline_s = deadline_s
        self.endpoint = (endpoint or os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")
        self.shown = re.sub(r"^(\w+://)?.*@", r"\1", self.endpoint)  # without a password, for messages
        try:
            self._origin = _origin(httpx.URL(self.endpoint))
        except httpx.InvalidURL:
            raise DataError(f"HF_ENDPOINT: {self.shown[:80]!r} is not a web address; correct or unset it") from None
        self._client = _new_client()
        self._operations: set[_Operation] = set()
        self._cancelled = threading.Event()
        self._signed: dict[str, str] = {}  # where a file's bytes were found last; good until refused

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.repo, self.deadline_s, self.endpoint)

    def waiting_for(self) -> str | None:
        """The operation that waits longest, if one failed before or is slow."""
        slow = [o for o in list(self._operations) if o.tries > 1 or _now() - o.since > SLOW_S]
        return str(min(slow, key=lambda operation: operation.since)) if slow else None

    def cancel(self) -> None:
        """From now on operations, also those in other threads, end with their current attempt."""
        self._cancelled.set()

    def body(self, path: str, what: str) -> tuple[bytes, str]:
        """All of an answer, and its Link header; both empty when the repository has no such file or folder."""

        def attempt(operation: _Operation) -> tuple[bytes, str]:
            with self._response(self.endpoint + path, {}, operation.timeout()) as response:
                if response.headers.get("X-Error-Code") == "EntryNotFound":
                    return b"", ""
                if response.status_code != 200:
                    raise self._refusal(response, what)
                body = bytearray()
                _receive(response, body, MAX_BODY_BYTES, operation.timeout())
                if len(body) == MAX_BODY_BYTES:
                    raise DataError(
                        f"{self.shown}{path}: answers more than {MAX_BODY_BYTES >> 20} MiB; check HF_ENDPOINT"
                    )
                return bytes(body), response.headers.get("Link", "")

        return self._retry(what, attempt)

    def read(self, path: str, start: int, stop: int, size: int, what: str) -> bytes:
        """Bytes [start, stop) of a file of `size` bytes. What arrived before a connection was cut is kept."""
        buffer = bytearray()

        def attempt(operation: _Operation) -> None:
            first = start + len(buffer)
            wanted = {"Range": f"bytes={first}-{stop - 1}"}
            try:
                url = self._signed.get(path, self.endpoint + path)
                with self._response(url, wanted, operation.timeout()) as response:
                    if response.status_code != 206:
                        raise self._refusal(response, what)
                    given = response.headers.get("Content-Range", "")
                    if given != f"bytes {first}-{stop - 1}/{size}":
                        raise DataError(
                            f"{what}: asked for bytes {first}-{stop - 1} of {size} and got {given!r}; check "
                            "HF_ENDPOINT, or set data.paths to a local mirror"
                        )
                    _receive(response, buffer, stop - start, operation.timeout(), operation.progress)
                    if len(buffer) < stop - start:
                        raise _Failure(f"the connection was cut, {stop - start - len(buffer)} bytes are missing")
            except BaseException:
                # A signature expired, or a host is down: the hub is asked again where the bytes are.
                self._signed.pop(path, None)
                raise
            if _origin(response.url) != self._origin:
                self._signed[path] = str(response.url)

        if start < stop:
            self._retry(what, attempt)
        return bytes(buffer)

    def _retry(self, what: str, attempt: Callable[[_Operation], T]) -> T:
        """What the first successful attempt returns. Failures that cannot pass raise a `DataError` at once."""
        operation = _Operation(what, self.deadline_s)
        self._operations.add(operation)
        try:
            while True:
                operation.tries += 1
                try:
                    return attempt(operation)
                except (_Failure, TimeoutError, httpx.TransportError, httpx.InvalidURL) as error:
                    operation.last = _describe(error, what)
                    retry_after = error.retry_after if isinstance(error, _Failure) else 0.0
                if operation.left() <= 0 or self._cancelled.is_set():
                    raise DataUnavailableError(
                        f"{what}: not available from {self.shown} for {_now() - operation.since:.1f} s, "
                        f"{operation.tries} tries, last: {operation.last}; check the network, allow more time with "
                        "data.first_batch_s (up to a run's first batch) or data.timeout_s (everywhere else), or set "
                        "data.paths to a local mirror"
                    )
                _pause(self._cancelled, operation.backoff(retry_after))
        finally:
            self._operations.remove(operation)

    @contextmanager
    def _response(self, url: str, headers: Mapping[str, str], timeout_s: float) -> Iterator[httpx.Response]:
        """The first answer that is no redirect, its body still to be read."""
        stop = _now() + timeout_s
        for _ in range(MAX_REDIRECTS + 1):
            request = self._client.build_request("GET", url, headers=headers, timeout=max(stop - _now(), 0.001))
            if _origin(request.url) == self._origin and (token := _token()):
                request.headers["Authorization"] = f"Bearer {token}"
            response = self._send(request)
            try:
                if response.next_request is None:
                    yield response
                    return
                _receive(response, bytearray(), CHUNK_BYTES, max(stop - _now(), 0.001))
                url = str(response.next_request.url)
            finally:
                response.close()
        raise _Failure(f"more than {MAX_REDIRECTS} redirects")

    def _send(self, request: httpx.Request) -> httpx.Response:
        try:
            return self._client.send(request, stream=True)
        except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
            # A server may close an idle connection just as it is used again, which is no failure.
            return self._client.send(request, stream=True)

    def _refusal(self, response: httpx.Response, what: str) -> Exception:
        """What a status other than success means: a failure that may pass, or an error with a remedy."""
        status, headers = response.status_code, response.headers
        if status in (408, 425, 429) or status >= 500:
            return _Failure(f"HTTP {status}", _retry_after(headers))
        if _origin(response.url) != self._origin and status in (401, 403, 404, 410):
            return _Failure(f"HTTP {status} from {response.url.host}")
        message, code = headers.get("X-Error-Message"), headers.get("X-Error-Code")
        reason = f"{what}: {self.shown} answers HTTP {status}" + (f" ({message})" if message else "")
        if code == "RevisionNotFound":
            return DataError(f"data.revision: {reason}; name a branch, a tag or a commit of {self.repo}")
        if code == "EntryNotFound":
            return DataError(f"{reason}; check data.revision and data.subset")
        if status in (401, 403):
            return DataError(
                f"{reason}; check that {self.repo} is the right name, set HF_TOKEN to a token that may read it (or log "
                "in with `hf auth login`, and accept the terms on its page where it has some), or unset one that is "
                "out of date"
            )
        if status == 404:
            return DataError(f"{reason}; there is no {self.repo}: check HF_ENDPOINT, and HF_TOKEN where it is private")
        if status == 200:
            return DataError(f"{reason} with a whole file to a request for a part; set data.paths to a local mirror")
        return DataError(f"{reason}, which is not expected; check HF_ENDPOINT, or set data.paths to a local mirror")


def cached_snapshot(repo: str, revision: str, include: Sequence[str]) -> Path | None:
    """Where a download into the hub's local cache left a revision; None without one, or when files that a pattern of
    `include` names are missing.

    Uses no network. Only newer versions of huggingface_hub know which files are missing.
    """
    try:
        found = huggingface_hub.snapshot_download(
            repo, repo_type="dataset", revision=revision, local_files_only=True, allow_patterns=list(include)
        )
    except FileNotFoundError:
        return None
    return Path(found)


def _receive(
    response: httpx.Response,
    buffer: bytearray,
    size: int,
    timeout_s: float,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Appends the body to the buffer up to `size` bytes. A body that is read to its end leaves the connection usable.

    A timeout of the client is that of one read; here many slow reads add up to one chunk.
    """
    stop, mark = _now() + timeout_s, len(buffer)
    for piece in response.iter_raw():
        if len(buffer) == size:  # there is more than `size`
            return
        buffer += piece if len(piece) <= size - len(buffer) else piece[: size - len(buffer)]
        if len(buffer) - mark >= CHUNK_BYTES or len(buffer) == size:
            progress()
            stop, mark = _now() + timeout_s, len(buffer)
        elif _now() > stop:
            raise TimeoutError


def _pause(cancelled: threading.Event, seconds: float) -> None:
    cancelled.wait(seconds)


def _origin(url: httpx.URL) -> tuple[str, str, int]:
    """Scheme, host and port: what a token belongs to."""
    if url.scheme not in ("http", "https") or not url.host:
        raise httpx.InvalidURL(f"{url} is not a web address")
    return url.scheme, url.host, url.port or (443 if url.scheme == "https" else 80)


def _retry_after(headers: Mapping[str, str]) -> float:
    """Seconds that a server asks to wait: a number, a date, or when its rate limit is reset; 0 without a request."""
    if limit := re.search(r"\br\s*=\s*0\s*;\s*t\s*=\s*(\d+)", headers.get("RateLimit", "")):
        return float(limit[1])
    value = headers.get("Retry-After", "").strip()
    if value.isdigit():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time()) if value else 0.0
    except ValueError:
        return 0.0


def _describe(error: Exception, what: str) -> str:
    """How an attempt failed, in a few words. A certificate that is refused will not pass and raises a `DataError`."""
    cause = error.__cause__ or error.__context__
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            raise DataError(
                f"{what}: the server's certificate is refused: {cause.verify_message}; "
                "set SSL_CERT_FILE to a file with your network's certificates"
            ) from None
        if isinstance(cause, ConnectionRefusedError):
            return "connection refused"
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, TimeoutError | httpx.TimeoutException):
        return "no answer in time"
    if isinstance(error, httpx.ReadError | httpx.WriteError | httpx.RemoteProtocolError):
        return "the connection was cut"
    return str(error) or type(error).__name__


def _token() -> str | None:
    """As huggingface_hub finds it: HF_TOKEN, or the file of a login. Looked up for every request: tokens expire."""
    return None if huggingface_hub.constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else huggingface_hub.get_token()


def _new_client() -> httpx.Client:
    tls = ssl.create_default_context()  # SSL_CERT_FILE, or the system's certificates, which a slim container lacks
    with suppress(ImportError):
        import certifi

        tls.load_verify_locations(certifi.where())
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE_S)
    headers = {"User-Agent": "nsa", "Accept-Encoding": "identity"}
    proxies = "HTTP_PROXY, HTTPS_PROXY or ALL_PROXY: cannot be used"
    with reworded(DataError, proxies, "correct or unset it", (ValueError, ImportError)):
        return httpx.Client(headers=headers, limits=limits, verify=tls)
