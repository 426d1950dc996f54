"""A hub that is slow, broken, overloaded, hostile or gone: the same documents, or a clear error in time."""

import logging
import pickle
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
from huggingface_hub.utils import _http

from nsa.data.sources import hub
from nsa.data.sources.base import Skipped
from nsa.data.waiting import Activity
from nsa.errors import DataError, DataUnavailableError
from tests.data.hub_server import REPO, HubServer
from tests.data.mirror import FIRST, fineweb_edu, texts_of, write_mirror

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
def test_a_fault_that_passes_changes_nothing(served, pauses, monkeypatch, side, match, fault):
    server, texts = served
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    server.fault(side=side, match=match, **fault)
    began = time.monotonic()
    assert texts_of(fineweb_edu(deadline_s=300)) == texts
    assert time.monotonic() - began < STILL_S, "a server that is still is not waited for"
    assert server.faults[0].times == 0
    if fault == FAULTS["no answer in time"]:
        asked = [(r.path.partition("?")[0], r.range, r.status) for r in server.log]  # without signatures
        (path, wanted, _), *_ = (request for request in asked if request[2] == 0)
        assert {status for *what, status in asked if what == [path, wanted]} & {200, 206, 302}, "asked for again"


def test_a_fault_amid_row_groups_changes_nothing(served, pauses):
    server, texts = served
    source = fineweb_edu(deadline_s=300)
    source.units()
    for fault in FAULTS.values():
        server.fault(**{**fault, "sleep": 0.0})
    assert texts_of(source) == texts
    assert not any(fault.times for fault in server.faults)


@pytest.mark.parametrize("skip", [0, 3], ids=["footer", "row group"])
def test_a_server_that_ignores_the_range_is_an_error(served, skip):
    server, _ = served
    server.fault(skip=skip, status=200)  # with a body of 7 bytes
    what = "row group 0" if skip else "footer"
    with pytest.raises(
        DataError, match=rf"parquet, {what}: asked for \d+ bytes from \d+ on and got 7; check HF_ENDPOINT"
    ):
        texts_of(fineweb_edu())


def test_a_signature_that_ran_out_is_asked_for_again(served):
    server, texts = served
    source = fineweb_edu(deadline_s=30)
    units = source.units()
    server.expire()
    server.time = lambda: time.time() + server.lifetime_s + 1
    assert [text for unit in units for text in source.documents(unit, Skipped())] == texts


def test_a_cut_connection_loses_no_more_than_a_part_of_a_range(tmp_path, hub_settings, pauses, monkeypatch):
    texts = write_mirror(tmp_path, files=1, row_groups=1, rows=3000)
    monkeypatch.setattr(hub, "RANGE_BYTES", 50_000)
    with HubServer(tmp_path) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        source = fineweb_edu()
        (unit,) = source.units()
        server.fault(skip=2, cut=15_000, times=2)
        assert list(source.documents(unit, Skipped())) == texts
        ranges = [request.range for request in server.requests("cdn")[1:]]
        assert len(ranges) == len(set(ranges)) + 2 > 4
        assert ranges[2] == ranges[3] == ranges[4]


def test_every_part_of_a_long_row_group_counts_as_arrived(tmp_path, hub_settings, monkeypatch):
    write_mirror(tmp_path, files=1, row_groups=1, rows=3000)
    monkeypatch.setattr(hub, "RANGE_BYTES", 30_000)
    activity = Activity()
    with HubServer(tmp_path) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        source = fineweb_edu()
        activity.watch(source)
        (unit,) = source.units()
        before, asked = activity.arrived(), len(server.requests("cdn"))
        next(iter(source.documents(unit, Skipped())))
        assert activity.arrived() - before == len(server.requests("cdn")) - asked > 4


def test_a_server_is_left_alone_for_as_long_as_it_asks(served, pauses):
    server, _ = served
    server.fault(side="hub", match="/tree/", status=429, retry_after="7")
    fineweb_edu().fingerprint()
    assert pauses == [8.0]


def test_a_server_that_is_always_overloaded_is_asked_for_about_the_deadline(served, pauses):
    server, _ = served
    server.fault(side="hub", status=503, times=10**9)
    with pytest.raises(DataUnavailableError, match=r"revision main: not available .* last: HTTP 503; check"):
        fineweb_edu(deadline_s=60).units()
    assert 60 <= sum(pauses) <= 80
    assert len(server.log) == len(pauses) + 1


def test_without_any_server_the_remedies_are_named(hub_settings, pauses, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    remedy = r"allow more time with data\.timeout_s, or set data\.paths"
    with pytest.raises(DataUnavailableError, match=f"last: .*Connection refused; check the network, {remedy}"):
        fineweb_edu(deadline_s=1.0).units()


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
        (FOUND + b"{}/again\r\n\r\n", "not available .*redirects"),
        (FOUND + b"file:///etc/passwd\r\n\r\n", "not available"),
        (FOUND + b"http://[\r\n\r\n", "not available"),
        (OK + b"Content-Length: -1\r\n\r\n{}", "not available"),
        (OK + b"X: " + b"x" * 200_000 + b"\r\n\r\n{}", "not available"),
        (b"\x00\xff" * 100, "not available"),
        (OK + b"\r\n" + b"[" * 500_000, "does not answer as a hub does: .*check HF_ENDPOINT"),
        (OK + b"\r\n[1, 2]", "revision main: .* does not answer as a hub does: .*check HF_ENDPOINT"),
        (OK + b"\r\n{", "does not answer as a hub does"),
    ],
    ids=[
        "ring",
        "local file",
        "no address",
        "no length",
        "long head",
        "no HTTP",
        "deep JSON",
        "other JSON",
        "cut JSON",
    ],
)
def test_a_hostile_answer_is_an_error(hub_settings, pauses, monkeypatch, answer, error):
    with answering(monkeypatch, answer), pytest.raises(DataError, match=error):
        fineweb_edu(deadline_s=1).units()


def test_a_file_that_cannot_be_had_is_named(served, pauses):
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
def test_permanent_failures_are_errors_at_once(served, match, status, remedy):
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
    source = fineweb_edu()
    source.fingerprint()
    assert (source.listed.done, source.listed.total) == (6, None), "pages that arrive count as progress"
    assert texts_of(source) == texts
    assert len(server.requests("hub", "/tree/")) == 10, "files and folders"


def test_a_listing_without_an_end_is_an_error(served, monkeypatch):
    server, _ = served
    monkeypatch.setattr(hub, "MAX_PAGES", 2)
    server.page = 1
    with pytest.raises(DataError, match=rf"lists {REPO} in more than 2 pages; check HF_ENDPOINT"):
        fineweb_edu().units()
    assert len(server.requests("hub", "/tree/")) == 2


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    "item",
    [
        '{"type": "file", "path": "a", "size": 1, "oid": ' + DEEP + "}",
        '{"type": "file", "size": 1}',
        '{"type": "file", "path": "a", "size": 1e999}',
        '{"type": "file", "path": "a", "size": null}',
        '"a"',
        DEEP,
    ],
    ids=["deep id", "no path", "endless size", "no size", "text", "deep"],
)
def test_an_entry_that_is_none_is_an_error(hub_settings, monkeypatch, item):
    error = r"listing: .* does not answer as a hub does: .*; check HF_ENDPOINT"
    with answering(monkeypatch, OK + b"\r\n" + f"[{item}]".encode()), pytest.raises(DataError, match=error):
        fineweb_edu(revision="c" * 40).units()


def test_a_password_in_the_endpoint_is_sent_and_never_shown(served, pauses, monkeypatch, caplog):
    server, texts = served
    monkeypatch.setattr(logging.getLogger("huggingface_hub"), "propagate", True)
    monkeypatch.setenv("HF_ENDPOINT", server.endpoint.replace("//", "//user:se@cret@"))
    server.fault(side="hub", match="/revision/", status=503)
    assert texts_of(fineweb_edu()) == texts
    assert {r.token[:6] for r in server.requests("hub")} == {"Basic "}
    server.fault(side="hub", match="/revision/", status=404)
    with pytest.raises(DataError, match=r"http://127") as refused:
        fineweb_edu().units()
    monkeypatch.setenv("HF_ENDPOINT", "user:se@cret@huggingface.co")
    with pytest.raises(DataError, match=r"HF_ENDPOINT: 'huggingface\.co' is not a web address") as wrong:
        fineweb_edu().units()
    assert "HTTP Error 503" in caplog.text, "the library says why it waits"
    for text in (refused.value, wrong.value, caplog.text):
        assert "cret" not in str(text)


def test_the_token_goes_to_the_hub_and_to_nobody_else(mirror, hub_settings, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with HubServer(mirror[0], token="hf_secret", page=2) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        server.link_base = server.cdn  # of the next pages of a listing
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


def test_threads_read_different_units_at_once(served, pauses):
    server, texts = served
    source = fineweb_edu(deadline_s=300)
    units = list(source.units()) * 3
    for fault in FAULTS.values():
        server.fault(**{**fault, "sleep": 0.0})
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda unit: list(source.documents(unit, Skipped())), units))
    assert [text for unit in found for text in unit] == texts * 3
    assert source.waiting_for() is None


def test_a_client_that_another_thread_closed_is_replaced(served, pauses, monkeypatch):
    _, texts = served
    closed = hub.httpx.Client()
    closed.close()
    clients, open_client = [None, closed], _http.get_session  # None: it is being replaced
    monkeypatch.setattr(_http, "get_session", lambda: clients.pop() if clients else open_client())
    assert texts_of(fineweb_edu()) == texts
    assert len(pauses) == 2


def test_other_threads_can_see_what_a_source_waits_for(served, monkeypatch):
    server, texts = served
    source = fineweb_edu(deadline_s=30)
    unit = source.units()[1]
    assert source.waiting_for() is None
    server.fault(sleep=0.5)
    reader = ThreadPoolExecutor(1).submit(lambda: list(source.documents(unit, Skipped())))
    wait_until(lambda: len(server.requests("cdn")) == 4 or None)
    assert source.waiting_for() is None, "not slow yet"
    monkeypatch.setattr(hub, "SLOW_S", 0.1)
    assert wait_until(source.waiting_for) == f"{FIRST}, row group 1: no answer from {server.endpoint} for 0 s"
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
    assert len(server.log) - before == 2 * len(units) == 24, "the hub's redirect, and the bytes"
    assert len({request.port for request in server.log[before:]}) == 2


def test_how_many_footers_are_read_can_be_seen_from_outside(served):
    server, _ = served
    source = fineweb_edu(deadline_s=30)
    assert str(source.listed) == "files are being listed"
    server.fault(match="002_00000", sleep=0.3)
    listing = ThreadPoolExecutor(1).submit(source.units)
    wait_until(lambda: source.listed.done == 2 or None)
    assert str(source.listed) == "2 of 3 footers read"
    listing.result(20)
    assert not source.listed.is_open
