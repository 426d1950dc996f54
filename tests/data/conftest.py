"""A mirror of FineWeb-Edu and tokenizers for all tests of a process, and a hub that serves the mirror to one test."""

import threading
import time
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.utils import _http

from nsa.data.tokenizers import ByteTokenizer, load_tokenizer
from nsa.data.vocabulary import train_bpe
from tests.data.hub_server import HubServer
from tests.data.mirror import write_mirror

VARIABLES = (
    "HF_TOKEN HF_HUB_OFFLINE TRANSFORMERS_OFFLINE HF_HUB_CACHE HUGGINGFACE_HUB_CACHE HF_HUB_DISABLE_IMPLICIT_TOKEN"
)


@pytest.fixture
def hub_settings(monkeypatch, tmp_path):
    """None of the user's settings."""
    for name in VARIABLES.split():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    # huggingface_hub reads HF_HOME when it is imported.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    # Its client reads the proxies when it is made.
    huggingface_hub.close_session()
    # Threads of earlier tests that still try to reach their server would close it too.
    monkeypatch.setattr(_http, "close_session", lambda: None)
    yield
    huggingface_hub.close_session()


@pytest.fixture
def pauses(monkeypatch):
    """The pauses between attempts, which take no time. Those of threads that earlier tests left do not count."""
    made, others = [], set(threading.enumerate()) - {threading.current_thread()}

    def sleep(seconds):
        if threading.current_thread() not in others:
            made.append(seconds)

    monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=sleep, time=time.time))
    return made


@pytest.fixture(scope="session")
def mirror(tmp_path_factory):
    """A folder, and the texts of its subset sample-10BT. Its files are larger than what is read of them at once."""
    folder = tmp_path_factory.mktemp("mirror")
    (folder / "README.md").write_text("about")
    write_mirror(folder, files=2, row_groups=2, rows=10, subset="data/CC-MAIN-2024-10")
    return folder, write_mirror(folder, fat=2500)


@pytest.fixture
def served(mirror, hub_settings, monkeypatch):
    """The server, and the texts of its subset sample-10BT."""
    with HubServer(mirror[0]) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        yield server, mirror[1]


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_bpe(["the key of a document is asked again = 17 or 23 or 99\n" * 20], path, vocab_size=300, max_bytes=1 << 20)
    return {"bytes": ByteTokenizer(), "bpe": load_tokenizer(str(path))}
