"""A hub that is slow, broken, overloaded, hostile or gone: the same documents, or a clear error in time."""

import pickle
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from email.utils import formatdate
from itertools import pairwise

import pytest

from nsa.data.sources import hub, repository
from nsa.data.sources.base import Skipped
from nsa.errors import DataError, DataUnavailableError
from tests.data.hub_server import REPO, HubServer
from tests.data.mirror import FIRST, fineweb_edu, texts_of, write_mirror


def test_the_server_of_these_tests_also_serves_the_hub_library(served, mirror):
    from huggingface_hub import HfFileSystem

    server, _ = served
    server.page = 2
    files = HfFileSystem(endpoint=server.endpoint, token=False, skip_instance_cache=True)
    found = files.find(f"datasets/{REPO}", detail=True)
    assert {name.removeprefix(f"datasets/{REPO}/"): info["size"] for name, info in found.items()} == {
        name: len(data) for name, data in server.commits[server.branches["main"]].items()
    }
    with files.open(f"datasets/{REPO}/{FIRST}", block_size=4096) as file:
        file.seek(1000)
        assert file.read(5000) == (mirror[0] / FIRST).read_bytes()[1000:6000]


STILL_S = 20.0  # of a server: much longer than its client waits
FAULTS = {
    "429": {"status": 429},
    "429 and a time to wait": {"status": 429, "retry_after": "0"},
    "429 and a date": {"status": 429, "retry_after": "Wed, 21 Oct 2015 07:28:00 GMT"},
    "500": {"status": 500},
    "503 four times": {"status": 503, "times": 4},
    "no answer in time": {"sleep": STILL_S},
    "cut before the body": {"cut": 0},
    "cut in the body": {"cut": 100},
    "a body that stops to come": {"cut": 100, "sleep": STILL_S},
    "reset before the answer": {"reset": True, "times": 2},
}


def faulty_requests():
    """Every fault while text is read; of those in the few requests before it, some in `make test-long`."""
    for side, match in [("hub", "/revision/"), ("hub", "/tree/"), ("hub", "/resolve/"), ("cdn", "")]:
        for name, fault in FAULTS.items():
            is_short = side == "cdn" or name in ("429", "500", "cut in the body")
            yield pytest.param(side, match, fault, marks=() if is_short else pytest.mark.long, id=f"{match}-{name}")


@pytest.mark.parametrize(("side", "match", "fault"), faulty_requests())
def test_a_fault_that_passes_changes_nothing(served, monkeypatch, side, match, fault):
    server, texts = served
    monkeypatch.setattr(hub, "ATTEMPT_S", 0.2)
    server.fault(side=side, match=match, **fault)
    began = time.monotonic()
    assert texts_of(fineweb_edu(deadline_s=300)) == texts
    assert time.monotonic() - began < STILL_S, "a server that is still is not waited for"
    assert server.faults[0].times == 0
    if fault == FAULTS["no answer in time"]:
        asked = [(r.path.partition("?")[0], r.range, r.status) for r in server.log]  # without signatures
        (path, wanted, _), *_ = (request for request in asked if request[2] == 0)
        assert {status for *what, status in asked if what == [path, wanted]} & {200, 206, 302}, "asked for again"


def test_a_fault_amid_row_groups_changes_nothing(served):
    server, texts = served
    source = fineweb_edu(deadline_s=30)
    source.units()
    for fault in FAULTS.values():
        server.fault(**{**fault, "sleep": 0.0})
    assert texts_of(source) == texts
    assert not any(fault.times for fault in server.faults)


def test_a_signature_that_ran_out_is_asked_for_again(served):
    server, texts = served
    source = fineweb_edu(deadline_s=30)
    units = source.units()
    server.expire()
    assert [text for unit in units for text in source.documents(unit, Skipped())] == texts
    assert sum(r.status == 403 for r in server.log) == 3
    server.expire()
    list(source.documents(units[0], Skipped()))
    server.time = lambda: time.time() + server.lifetime_s + 1
    assert list(source.documents(units[0], Skipped())) == texts[:50]


def test_what_arrived_before_a_cut_is_not_fetched_again(tmp_path, hub_settings, monkeypatch):
    texts = write_mirror(tmp_path, files=1, row_groups=1, rows=3000)
    monkeypatch.setattr(hub, "CHUNK_BYTES", 10_000)
    with HubServer(tmp_path) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        source = fineweb_edu(deadline_s=1.0)
        (unit,) = source.units()
        server.fault(cut=15_000, times=100)  # many more tries than the deadline would allow without progress
        assert list(source.documents(unit, Skipped())) == texts
        ranges = [int(re.match(r"bytes=(\d+)", r.range)[1]) for r in server.requests("cdn")[1:]]
        assert len(ranges) > 8
        assert {b - a for a, b in pairwise(ranges)} == {15_000}


@pytest.mark.parametrize("header", ["7", "a date"])
def test_a_server_is_left_alone_for_as_long_as_it_asks(served, clock, header):
    server, _ = served
    wait = formatdate(time.time() + 8, usegmt=True) if header == "a date" else header
    server.fault(side="hub", match="/tree/", status=429, retry_after=wait)
    fineweb_edu().fingerprint()
    (pause,) = clock.pauses
    assert 6.0 <= pause <= 8.0


@pytest.mark.parametrize("wait", [None, "3600"])
def test_the_deadline_holds_against_a_server_that_is_always_overloaded(served, clock, wait):
    server, _ = served
    server.fault(side="hub", status=503, times=10**9, retry_after=wait)
    with pytest.raises(DataUnavailableError, match=r"revision main: .* for 1\.0 s, \d+ tries, last: HTTP 503; check"):
        fineweb_edu(deadline_s=1.0).units()
    assert clock.now == pytest.approx(1.0)
    assert len(server.log) == len(clock.pauses) + 1, "a last attempt at the deadline"
    assert len(server.log) == 2 if wait else len(server.log) > 5


def test_the_deadline_holds_without_any_server(hub_settings, clock, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    remedy = r"data\.first_batch_s \(up to a run's first batch\) or data\.timeout_s \(everywhere else\)"
    with pytest.raises(DataUnavailableError, match=f"last: connection refused; .* more time with {remedy}"):
        fineweb_edu(deadline_s=1.0).units()
    assert clock.now == pytest.approx(1.0)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"])
def test_the_deadline_holds_against_a_server_that_sends_nothing_or_very_little(hub_settings, monkeypatch, answer):
    def drip():
        while answer:
            connection, _ = server.accept()
            with suppress(OSError), connection:
                connection.sendall(answer)
                while True:
                    connection.sendall(b" ")
                    time.sleep(0.02)

    def serve():
        with suppress(OSError):  # the test is over
            drip()

    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        threading.Thread(target=serve, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(DataUnavailableError, match=r"for \d\.\d s, .* last: no answer in time"):
            fineweb_edu(deadline_s=0.3).units()


@contextmanager
def answering(monkeypatch, answer):
    """A server that gives every request the same bytes, with its own address for {}; yields what it was asked."""
    asked = []

    def serve():
        with suppress(OSError):  # the test is over
            while True:
                connection, _ = server.accept()
                with suppress(OSError), connection:
                    asked.append(connection.recv(1 << 16))
                    connection.sendall(answer.replace(b"{}", address.encode()))

    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("HF_ENDPOINT", address)
        threading.Thread(target=serve, daemon=True).start()
        yield asked


FOUND = b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nConnection: close\r\nLocation: "
OK = b"HTTP/1.1 200 OK\r\nConnection: close\r\n"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (FOUND + b"{}/again\r\n\r\n", "last: more than 5 redirects"),
        (FOUND + b"file:///etc/passwd\r\n\r\n", "not available"),
        (FOUND + b"http://[\r\n\r\n", "not available"),
        (OK + b"Content-Length: -1\r\n\r\n{}", "not available"),
        (OK + b"X: " + b"x" * 200_000 + b"\r\n\r\n{}", "not available"),
        (b"\x00\xff" * 100, "not available"),
        (OK + b"\r\n" + b"[" * 5000, "not what a hub answers: Invalid JSON: .*check HF_ENDPOINT"),
        (OK + b"\r\n" + b" " * 20_000, "answers more than"),
        (OK + b"\r\n[1, 2]", "revision/main: this is not what a hub answers: .*check HF_ENDPOINT"),
    ],
    ids=[
        "ring",
        "local file",
        "no address",
        "no length",
        "long head",
        "no HTTP",
        "deep JSON",
        "long JSON",
        "other JSON",
    ],
)
def test_a_hostile_answer_is_an_error(hub_settings, clock, monkeypatch, answer, error):
    monkeypatch.setattr(hub, "MAX_BODY_BYTES", 10_000)
    monkeypatch.setattr(hub, "BACKOFF_FIRST_S", 60.0)  # two attempts are enough
    monkeypatch.setattr(hub, "BACKOFF_MAX_S", 60.0)
    with answering(monkeypatch, answer), pytest.raises(DataError, match=error):
        fineweb_edu(deadline_s=20).units()


def test_a_redirect_with_an_endless_body_is_not_read_to_its_end(hub_settings, clock, monkeypatch):
    monkeypatch.setattr(hub, "BACKOFF_MAX_S", 60.0)
    monkeypatch.setattr(hub, "BACKOFF_FIRST_S", 60.0)
    body = b"x" * (hub.CHUNK_BYTES + (4 << 20))
    endless = b"HTTP/1.1 302 Found\r\nContent-Length: 1000000000000\r\nLocation: {}/again\r\n\r\n" + body
    with answering(monkeypatch, endless) as asked, pytest.raises(DataUnavailableError, match="redirects"):
        fineweb_edu(deadline_s=20).units()
    assert len(asked) == 2 * (hub.MAX_REDIRECTS + 1)


def test_a_file_that_cannot_be_had_is_named(served, clock):
    server, _ = served
    source = fineweb_edu(deadline_s=0.5)
    units = source.units()
    server.fault(match="000_00000", status=500, times=10**9)
    with pytest.raises(DataUnavailableError, match=rf"{FIRST}, row group 2: .* last: HTTP 500; .*data\.paths"):
        list(source.documents(units[2], Skipped()))
    with pytest.raises(DataUnavailableError, match=f"{FIRST}, footer: "):
        fineweb_edu(deadline_s=0.5).units()


@pytest.mark.parametrize("match", ["/revision/", "/tree/", "/resolve/"])
@pytest.mark.parametrize(("status", "remedy"), [(401, "HF_TOKEN"), (403, "HF_TOKEN"), (404, "HF_ENDPOINT")])
def test_what_will_not_pass_is_an_error_at_once(served, match, status, remedy):
    server, _ = served
    server.fault(side="hub", match=match, status=status)
    with pytest.raises(DataError, match=rf"HTTP {status}.*{remedy}") as error:
        fineweb_edu().units()
    assert not isinstance(error.value, DataUnavailableError)
    assert len(server.requests("hub", match)) <= 3, "one for each file, and none again"


def test_a_wrong_endpoint_is_named(served, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "huggingface.co")
    with pytest.raises(DataError, match=r"HF_ENDPOINT: 'huggingface\.co' is not a web address"):
        fineweb_edu().units()
    monkeypatch.setenv("HF_ENDPOINT", served[0].endpoint + "/elsewhere")
    with pytest.raises(DataError, match=r"Repository not found.*check HF_ENDPOINT"):
        fineweb_edu().units()


@pytest.mark.parametrize("link_base", [None, "https://huggingface.co"])
def test_a_listing_of_many_pages_is_read_to_its_end(served, link_base):
    server, texts = served
    server.page, server.link_base = 1, link_base
    assert texts_of(fineweb_edu()) == texts
    assert len(server.requests("hub", "/tree/")) == 3


def test_a_listing_without_an_end_is_an_error(served, monkeypatch):
    monkeypatch.setattr(repository, "MAX_PAGES", 5)
    answer = b'[{"type": "file", "path": "a.parquet", "size": 1}]', '<https://huggingface.co/?cursor=again>; rel="next"'
    asked = []
    monkeypatch.setattr(hub.Hub, "body", lambda self, path, what: asked.append(path) or answer)
    with pytest.raises(DataError, match=r"/tree/.*: a listing of more than 5 pages; check HF_ENDPOINT"):
        repository.HubRepository(hub.Hub(REPO, 1.0), "c" * 40).below("sample")
    assert len(asked) == 5


DEEP = "[" * 990 + "]" * 990


@pytest.mark.parametrize(
    "item",
    [
        '{"type": "file", "path": "a", "size": 1, "oid": ' + DEEP + "}",
        '{"type": "file", "size": 1, "path": ' + DEEP + "}",
        '{"type": "directory", "path": {}}',
        '{"type": "file", "path": "a", "size": 1e999}',
        '{"type": "file", "path": "a", "size": 1, "oid": [1]}',
        DEEP,
    ],
    ids=["deep id", "deep path", "no path", "endless size", "no id", "deep"],
)
def test_an_entry_that_is_none_is_an_error(served, monkeypatch, item):
    monkeypatch.setattr(hub.Hub, "body", lambda self, path, what: (f"[{item}]".encode(), ""))
    with pytest.raises(DataError, match=r"/tree/.*: this is not what a hub answers: .*; check HF_ENDPOINT"):
        repository.HubRepository(hub.Hub(REPO, 1.0), "c" * 40).below("sample")


def test_a_password_in_the_endpoint_is_sent_and_never_shown(served, monkeypatch):
    server, texts = served
    monkeypatch.setenv("HF_ENDPOINT", server.endpoint.replace("//", "//user:se@cret@"))
    assert texts_of(fineweb_edu()) == texts
    server.fault(side="hub", match="/revision/", status=404)
    with pytest.raises(DataError, match=r"http://127") as refused:
        fineweb_edu().units()
    monkeypatch.setenv("HF_ENDPOINT", "user:se@cret@huggingface.co")
    with pytest.raises(DataError, match=r"HF_ENDPOINT: 'huggingface\.co' is not a web address") as wrong:
        fineweb_edu().units()
    for error in (refused, wrong):
        assert "cret" not in str(error.value)


def test_the_token_goes_to_the_hub_and_to_nobody_else(mirror, hub_settings, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with HubServer(mirror[0], token="hf_secret") as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        source = fineweb_edu()
        assert texts_of(source) == mirror[1]
        assert {r.token for r in server.requests("hub")} == {"Bearer hf_secret"}
        assert {r.token for r in server.requests("cdn")} == {None}
        assert b"hf_secret" not in pickle.dumps(source)
        monkeypatch.setenv("HF_TOKEN", "hf_stale")
        with pytest.raises(DataError, match=r"HTTP 401 .*HF_TOKEN") as error:
            fineweb_edu().units()
        assert "hf_stale" not in str(error.value)


def test_a_proxy_is_used_where_the_environment_names_one(served, monkeypatch):
    server, texts = served
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, server.endpoint.replace("//", "//me:pass@"))
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    assert texts_of(fineweb_edu()) == texts
    assert {r.path[:19] for r in server.requests("hub")} == {"http://hub.invalid/"}


def test_threads_read_different_units_at_once(served):
    server, texts = served
    source = fineweb_edu(deadline_s=30)
    units = list(source.units()) * 3
    for fault in FAULTS.values():
        server.fault(**{**fault, "sleep": 0.0})
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda unit: list(source.documents(unit, Skipped())), units))
    assert [text for unit in found for text in unit] == texts * 3
    assert source.waiting_for() is None


def test_what_is_waited_for_can_be_seen_from_outside(served, clock, monkeypatch):
    server, texts = served
    source = fineweb_edu(deadline_s=30)
    unit = source.units()[1]
    assert source.waiting_for() is None
    paused, released = threading.Event(), threading.Event()

    def pause(_cancelled, seconds):
        paused.set()
        assert released.wait(30)

    monkeypatch.setattr(hub, "_pause", pause)
    server.fault(status=503)
    reader = ThreadPoolExecutor(1).submit(lambda: list(source.documents(unit, Skipped())))
    assert paused.wait(30)
    assert source.waiting_for() is None, "not slow yet"
    clock.now += 3
    assert source.waiting_for() == f"{FIRST}, row group 1: try 1, 3 s, last: HTTP 503"
    send, asked, answered = hub.Hub._send, threading.Event(), threading.Event()

    def held(self, request):
        asked.set()
        assert answered.wait(30)
        return send(self, request)

    monkeypatch.setattr(hub.Hub, "_send", held)
    released.set()
    assert asked.wait(30)
    assert source.waiting_for() == f"{FIRST}, row group 1: try 2, 3 s, last: HTTP 503"
    answered.set()
    assert reader.result(20) == texts[50:100]
    assert source.waiting_for() is None


def wait_until(value):
    stop = time.monotonic() + 10
    while (found := value()) is None and time.monotonic() < stop:
        time.sleep(0.01)
    return found


def test_connections_are_kept_from_request_to_request(served):
    server, texts = served
    source = fineweb_edu()
    units = source.units()
    before = len(server.log)
    assert [text for unit in units for text in source.documents(unit, Skipped())] == texts
    assert len(server.log) - before == len(units) == 12
    assert len({request.port for request in server.log[before:]}) == 1
    assert len({request.port for request in server.requests("hub", "/api/")}) == 1


def test_an_idle_connection_that_the_server_closed_is_no_failure(served, clock):
    server, texts = served
    source = fineweb_edu()
    units = source.units()
    server.fault(reset=True)  # met by the connection that was kept
    assert list(source.documents(units[0], Skipped())) == texts[:50]
    assert [r.status for r in server.requests("cdn")[3:]] == [-1, 206]
    assert not clock.pauses, "what a failure would cost"


def test_how_many_footers_are_read_can_be_seen_from_outside(served):
    server, _ = served
    source = fineweb_edu(deadline_s=30)
    assert str(source.listed) == "files are being listed"
    server.fault(match="002_00000", status=503, times=10**9)
    listing = ThreadPoolExecutor(1).submit(source.units)
    wait_until(lambda: source.listed.done == 2 or None)
    assert str(source.listed) == "2 of 3 footers read"
    server.faults.clear()
    listing.result(20)
    assert not source.listed.is_open


@pytest.mark.timeout(150)
def test_a_file_that_fails_for_good_ends_the_wait_for_the_others(served):
    server, _ = served
    server.fault(status=503, times=10**9)
    server.fault(side="hub", match="002_00000", status=403)
    with pytest.raises(DataError, match=r"002_00000.parquet, footer: .* HTTP 403"):
        fineweb_edu(deadline_s=60).units()
    assert not [t for t in threading.enumerate() if t.name.startswith("footer")]
