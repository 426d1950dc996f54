"""Reads a dataset repository on the Hugging Face hub: the commit of a revision, its README, its files and byte ranges.

huggingface_hub sends the requests: it handles token, proxies, certificates, timeouts and retries. `HfFileSystem` is not
used: it follows the next page of a listing to any host, with the token and without a timeout.
"""

import os
import re
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib import import_module
from typing import Any, BinaryIO, TypeVar, cast
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from fsspec.spec import AbstractBufferedFile
from huggingface_hub import constants, get_token, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, RevisionNotFoundError
from huggingface_hub.utils import hf_raise_for_status, http_backoff  # type: ignore[attr-defined]

from nsa.data.sources.base import Entry
from nsa.data.sources.subsets import CARD
from nsa.errors import DataError, DataUnavailableError

# The module, httpx or httpx2, that huggingface_hub uses, found by the base class of its error.
httpx: Any = import_module(HfHubHTTPError.__mro__[1].__module__.partition(".")[0])
T = TypeVar("T")
MAX_PAGES = 1000  # pages of a listing, a thousand files each
RANGE_BYTES = 8 << 20  # bytes of one request: the most that a broken connection loses
FOOTERS = 256  # ranges in the cache; arrow reads one or two per file; the footer of 700 row groups is 1.4 MB
SLOW_S = 2.0  # a request that takes longer is reported
RETRIED_STATUS = 408, 425, 429, *range(500, 600)
# After a failed connection, huggingface_hub closes its client and sets it to None while another thread may be using it:
# that thread gets a RuntimeError or an AttributeError.
CLIENT_CLOSED = RuntimeError, AttributeError
CONNECTION_ERRORS = httpx.TimeoutException, httpx.NetworkError, httpx.RemoteProtocolError, *CLIENT_CLOSED
# Errors from parsing an answer that is not a hub's, and from an unknown kind of proxy.
INVALID_ANSWER = ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, ImportError
_CHECK = "check HF_ENDPOINT, or set data.paths to a local mirror"


class _RemoteFile(AbstractBufferedFile):  # type: ignore[misc]
    def _fetch_range(self, start: int, end: int) -> bytes:
        return cast(bytes, self.kwargs["fetch"](start, end))


class HubRepository:
    """A repository at the current commit of `revision`. Caches footers. Thread-safe, and can be pickled.

    Failed requests are retried for about `deadline_s`, unless the failure is permanent.
    """

    def __init__(self, repo: str, revision: str, deadline_s: float):
        self.repo, self.commit, self.deadline_s = repo, revision, deadline_s
        given = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
        place = re.fullmatch(r"(https?://)(?:(.+)@)?([^/@].*)", given)
        if place is None:
            raise DataError(f"HF_ENDPOINT: {given.rpartition('@')[2][:80]!r} is not a web address; correct or unset it")
        self.endpoint, self._password = place[1] + place[3], place[2]  # separate: addresses are logged and shown
        self.answered = 0  # requests; row groups that take long consist of many
        self._asked: dict[object, tuple[float, str]] = {}
        self._footer = lru_cache(FOOTERS)(self._range)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.repo, self.commit, self.deadline_s)

    def card(self) -> str:
        return self._get(self._url(CARD), f"{self.repo}, {CARD}", lambda answer: cast(str, answer.text))

    def files(self) -> Iterator[Entry]:
        """Resolves the revision to a commit and yields all files of the commit."""

        def page(answer: Any) -> tuple[list[Entry], str]:
            items = [(item, item.get("lfs") or item) for item in answer.json() if item["type"] == "file"]
            entries = [Entry(str(item["path"]), int(item["size"]), str(lfs.get("oid", ""))) for item, lfs in items]
            return entries, str(answer.links.get("next", {}).get("url", ""))

        if not re.fullmatch(r"[0-9a-f]{40}", self.commit):
            url = f"{self.endpoint}/api/datasets/{self.repo}/revision/{quote(self.commit, safe='')}"
            what = f"{self.repo}, revision {self.commit}"
            self.commit = self._get(url, what, lambda answer: str(answer.json()["sha"]))
        query = {"recursive": "true", "expand": "false"}
        for _ in range(MAX_PAGES):
            url = f"{self.endpoint}/api/datasets/{self.repo}/tree/{quote(self.commit)}?{urlencode(query)}"
            entries, link = self._get(url, f"{self.repo}, listing", page)
            yield from entries
            if not link:
                return
            # Only the query: a mirror passes on links that lead to the hub itself.
            query = dict(parse_qsl(urlsplit(link).query))
        raise DataError(f"{self.endpoint}: lists {self.repo} in more than {MAX_PAGES} pages; {_CHECK}")

    def open(self, entry: Entry, what: str) -> BinaryIO:
        """Opens a file whose bytes are fetched on demand. `what` describes the part of the file, for messages."""

        def fetch(start: int, stop: int) -> bytes:
            if stop >= entry.size - 8:  # where a footer ends
                return self._footer(entry, start, stop)
            starts = range(start, stop, RANGE_BYTES)
            return b"".join(self._range(entry, at, min(at + RANGE_BYTES, stop), what) for at in starts)

        return cast(BinaryIO, _RemoteFile(None, entry.name, size=entry.size, cache_type="none", fetch=fetch))

    def waiting_for(self) -> str | None:
        """Describes the longest request, if it is slow."""
        began, what = min(self._asked.copy().values(), default=(time.monotonic(), ""))
        seconds = time.monotonic() - began
        return f"{what}: no answer from {self.endpoint} for {seconds:.0f} s" if seconds > SLOW_S else None

    def _url(self, name: str) -> str:
        return hf_hub_url(self.repo, name, repo_type="dataset", revision=self.commit, endpoint=self.endpoint)

    def _range(self, entry: Entry, start: int, stop: int, what: str = "footer") -> bytes:
        what, wanted = f"{entry.name}, {what}", f"bytes={start}-{stop - 1}"
        data = self._get(self._url(entry.name), what, lambda answer: cast(bytes, answer.content), Range=wanted)
        if len(data) != stop - start:
            raise DataError(f"{what}: asked for {stop - start} bytes from {start} on and got {len(data)}; {_CHECK}")
        return data

    def _get(self, url: str, what: str, read: Callable[[Any], T], **headers: str) -> T:
        """Returns `read(answer)`. The client does not send the token to hosts that the hub redirects to."""
        self._asked[request := object()] = time.monotonic(), what
        headers["Accept-Encoding"] = "identity"
        if self._password:
            headers["Authorization"] = "Basic " + b64encode(unquote(self._password).encode()).decode()
        elif token := None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token():
            headers["Authorization"] = f"Bearer {token}"
        try:
            retries: Any = {"retry_on_exceptions": CONNECTION_ERRORS, "retry_on_status_codes": RETRIED_STATUS}
            retries["max_retries"] = 3 + int(self.deadline_s / 8)  # after 1, 2, 4, 8, 8 and so on seconds
            answer = http_backoff("GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT, **retries)
            hf_raise_for_status(answer)
            self.answered += 1
            return read(answer)
        except INVALID_ANSWER as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise DataError(
                f"{what}: {self.endpoint} does not answer as a hub does: {reason}; check HF_ENDPOINT and HTTPS_PROXY"
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL, RuntimeError) as error:
            raise self._error(error, what) from None
        finally:
            del self._asked[request]

    def _error(self, error: Exception, what: str) -> DataError:
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
        if not isinstance(error, HfHubHTTPError) or status in RETRIED_STATUS:
            last = f"HTTP {status}" if status else str(error) or type(error).__name__
            return DataUnavailableError(
                f"{what}: not available from {self.endpoint}, last: {last}; check the network, allow more time with "
                "data.timeout_s, or set data.paths to a local mirror"
            )
        message = error.response.headers.get("X-Error-Message") or "no reason"
        answer = f"{what}: {self.endpoint} answers HTTP {status} ({message})"
        if isinstance(error, RevisionNotFoundError):
            return DataError(f"data.revision: {answer}; name a branch, a tag or a commit of {self.repo}")
        if status in (401, 403):
            remedy = "accept the terms on its page and set HF_TOKEN to a token that may read it, or unset an old one"
            return DataError(f"{answer}; check that {self.repo} is the right name, {remedy}")
        return DataError(f"{answer}; {f'there is no {self.repo}: ' if status == 404 else ''}{_CHECK}")
