"""What a run relies on when text becomes tokens: nothing lost, nothing added, the same everywhere."""

import hashlib
import http.server
import json
import os
import pickle
import string
import subprocess
import sys
import sysconfig
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tiktoken.load
import tiktoken_ext.openai_public
import tokenizers as hf
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from nsa.data import tokenizers
from nsa.data.tokenizers import load_tokenizer, pieces
from nsa.errors import ConfigError, DataError, DataUnavailableError

TEXTS = ["", " ", "a  b\n\n\tc's 12345", "naïve ☃ 😀 日本語", "\x00\x7f\ufeff", "say <|endoftext|> and </s>", "x" * 999]
WIDE = "\uff1c/s\uff1e"  # that some vocabularies read as </s>
any_text = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=200)
quickly = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def library_text(size):
    folder = Path(sysconfig.get_paths()["stdlib"])
    names = ["argparse", "typing", "inspect", "datetime", "tarfile", "doctest", "subprocess", "threading"]
    return [(folder / f"{name}.py").read_text(encoding="utf-8")[:size] for name in names]


def trained(model, trainer, *, pre_tokenizer, decoder):
    tokenizer = hf.Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoder
    tokenizer.train_from_iterator(library_text(40_000), trainer)
    return json.loads(tokenizer.to_str())


@pytest.fixture(scope="module")
def byte_level():
    """The content of a tokenizer.json with byte-level BPE."""
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|endoftext|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    before = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return trained(models.BPE(), trainer, pre_tokenizer=before, decoder=decoders.ByteLevel())


@pytest.fixture(scope="module")
def byte_fallback():
    """The content of a tokenizer.json in the manner of Llama 2: a visible space, and bytes for unknown characters."""
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>", "</s>"], show_progress=False)
    before = pre_tokenizers.Metaspace(prepend_scheme="never")
    after = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")])
    spec = trained(models.BPE(unk_token="<unk>"), trainer, pre_tokenizer=before, decoder=after)
    vocabulary = spec["model"]["vocab"]
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    spec["model"]["byte_fallback"] = True
    return spec


@pytest.fixture
def unigram():
    """The content of a tokenizer.json in the manner of T5, which loses information."""
    scores = {"<unk>": 0.0, "</s>": 0.0, "▁": -2.0, **dict.fromkeys(string.printable.strip(), -4.0)}
    tokenizer = hf.Tokenizer(models.Unigram(list(scores.items()), unk_id=0))
    tokenizer.normalizer, tokenizer.decoder = normalizers.NFKC(), decoders.Metaspace()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return json.loads(tokenizer.to_str())


@pytest.fixture(scope="module")
def gpt2_files(byte_level):
    """A small vocabulary in GPT-2's file of merges, and in the one of ids that other readers need."""
    lines, vocabulary = [], dict.fromkeys(bpe_alphabet())
    for left, right in byte_level["model"]["merges"]:
        if left + right not in vocabulary:
            vocabulary[left + right] = None
            lines.append(f"{left} {right}\n")
    encoder = {token: i for i, token in enumerate([*vocabulary, "<|endoftext|>"])}
    return {"vocab.bpe": ("#version: 0.2\n" + "".join(lines)).encode(), "encoder.json": json.dumps(encoder).encode()}


def bpe_alphabet():
    printable = [chr(b) for b in range(256) if chr(b).isprintable() and b != 32]
    return [*printable, *(chr(256 + i) for i in range(256 - len(printable)))]


@pytest.fixture
def gpt2_folder(tmp_path, gpt2_files, monkeypatch):
    folder = tmp_path / "gpt2"
    folder.mkdir()
    for name, data in gpt2_files.items():
        (folder / name).write_bytes(data)
    expect(monkeypatch, gpt2_files, "http://127.0.0.1:9/")
    return folder


def expect(monkeypatch, files, url):
    monkeypatch.setattr(tokenizers, "GPT2_URL", f"{url}vocab.bpe")
    monkeypatch.setattr(tokenizers, "GPT2_SHA256", hashlib.sha256(files["vocab.bpe"]).hexdigest())


def save(tmp_path, spec, name="tokenizer.json"):
    path = tmp_path / name
    path.write_text(json.dumps(spec), encoding="utf-8")
    return str(path)


@pytest.fixture
def gpt2(gpt2_folder):
    return load_tokenizer("gpt2", path=str(gpt2_folder))


@pytest.fixture(params=["bytes", "gpt2", "byte_level", "byte_fallback"])
def lossless(request, tmp_path):
    """Each kind of tokenizer that keeps every byte."""
    if request.param == "bytes":
        return load_tokenizer("bytes")
    if request.param == "gpt2":
        return request.getfixturevalue("gpt2")
    return load_tokenizer(save(tmp_path, request.getfixturevalue(request.param)))


# Text to ids and back


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_from_its_ids_and_is_counted_in_bytes(lossless, text):
    ids = lossless.encode(text)
    assert lossless.decode(ids.tolist()) == text
    assert lossless.byte_lengths[ids].sum() == len(text.encode())
    assert lossless.byte_lengths.shape == (lossless.vocab_size,)
    assert ids.dtype == lossless.dtype
    assert lossless.separator not in ids
    assert lossless.byte_lengths[lossless.separator] == 0


@quickly
@given(text=any_text)
def test_every_text_survives_a_byte_level_vocabulary(lossless, text):
    assume("▁" not in text)  # stands for a space where spaces are made visible
    ids = lossless.encode(text)
    assert lossless.decode(ids.tolist()) == text
    assert lossless.byte_lengths[ids].sum() == len(text.encode())


@quickly
@given(texts=st.lists(any_text, max_size=6))
def test_many_texts_at_once_equal_each_alone(lossless, texts):
    together = lossless.encode_many(texts)
    assert [ids.tolist() for ids in together] == [lossless.encode(text).tolist() for text in texts]


def test_ids_need_as_few_bytes_as_the_vocabulary_allows(tmp_path, byte_level, gpt2):
    assert load_tokenizer("bytes").dtype == np.uint8
    assert gpt2.dtype == np.uint16
    words = {"<eos>": 0, **{f"w{i}": i for i in range(1, 256)}}
    spec = {**byte_level, "added_tokens": [], "model": {"type": "WordLevel", "vocab": words, "unk_token": "<eos>"}}
    assert load_tokenizer(save(tmp_path, spec)).dtype == np.uint8
    words["last"] = 256
    assert load_tokenizer(save(tmp_path, spec)).dtype == np.uint16
    words["last"] = 70_000
    sparse = load_tokenizer(save(tmp_path, spec))
    assert (sparse.dtype, sparse.vocab_size) == (np.uint32, 70_001)


def test_lone_surrogates_are_replaced_and_do_not_stop_a_run(lossless):
    assert lossless.decode(lossless.encode("a\ud800b \udfff").tolist()) == "a\ufffdb \ufffd"


def test_separators_do_not_show_in_decoded_text(lossless):
    ids = lossless.encode("some words").tolist()
    assert lossless.decode([lossless.separator, *ids, lossless.separator]) == "some words"


def test_four_threads_at_once_get_the_same_ids(lossless):
    batches = [[text[i : i + 3000] for text in library_text(30_000)] for i in range(0, 30_000, 3000)]
    alone = [lossless.encode_many(batch) for batch in batches]
    with ThreadPoolExecutor(4) as threads:
        at_once = list(threads.map(lossless.encode_many, batches * 2))
    for expected, found in zip(alone * 2, at_once, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(expected, found, strict=True))


def test_a_pickled_tokenizer_works_alike_in_another_process(lossless):
    program = "import pickle, sys; t = pickle.load(sys.stdin.buffer); text = pickle.load(sys.stdin.buffer)\n"
    program += "pickle.dump((t.name, t.fingerprint, t.encode(text), t.byte_lengths), sys.stdout.buffer)"
    text = " <|endoftext|> ".join(TEXTS)
    result = subprocess.run(
        [sys.executable, "-c", program],
        input=pickle.dumps(lossless) + pickle.dumps(text),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
    )
    name, fingerprint, ids, byte_lengths = pickle.loads(result.stdout)
    assert (name, fingerprint) == (lossless.name, lossless.fingerprint)
    assert np.array_equal(ids, lossless.encode(text))
    assert np.array_equal(byte_lengths, lossless.byte_lengths)


def test_a_tokenizer_json_works_on_the_calling_thread_alone(tmp_path, byte_level):
    program = "import os, sys; from nsa.data.tokenizers import load_tokenizer; t = load_tokenizer(sys.argv[1])\n"
    program += "def threads(): return len(os.listdir('/proc/self/task'))\n"
    program += "before = threads(); t.encode_many(['some text'] * 500); print(before, threads())"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TOKENIZERS_PARALLELISM", None)
    command = [sys.executable, "-c", program, save(tmp_path, byte_level)]
    before, after = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    assert before == after


# Long documents


def test_long_texts_are_cut_before_a_space_and_wherever_there_is_none():
    assert pieces("aaa bbb ccc", 8) == ["aaa bbb", " ccc"]
    assert pieces("aaa   bbb", 6) == ["aaa  ", " bbb"]
    assert pieces("aaa\nbbb", 5) == ["aaa", "\nbbb"]
    assert pieces("abcdefgh", 3) == ["abc", "def", "gh"]
    assert pieces("abc", 3) == ["abc"]
    assert pieces("", 3) == [""]


@quickly
@given(text=st.text(alphabet="ab \n", max_size=80), limit=st.integers(1, 20))
def test_pieces_hold_the_whole_text_and_keep_the_limit(text, limit):
    found = pieces(text, limit)
    assert "".join(found) == text
    assert all(0 < len(piece) <= limit for piece in found) or text == ""


SOME_SPACE = st.sampled_from(["", "\n", "  ", "\t", "\r\n", " \n ", "\u00a0"])
SOME_WORD = st.sampled_from(["the", "x", "It's", "don't.", "12345", "--", "naïve", "日本", "...)", "'s", '"'])


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(st.tuples(SOME_WORD, SOME_SPACE), max_size=60))
def test_a_cut_before_a_space_changes_no_token(gpt2, gpt4_style, parts):
    text = "".join(f" {word}{space}" for word, space in parts)
    for tokenizer in (gpt2, gpt4_style):
        tokenizer.longest_piece = 1 << 20
        whole = tokenizer.encode(text)
        tokenizer.longest_piece = 24
        assert tokenizer.encode(text).tolist() == whole.tolist()


@pytest.fixture
def gpt4_style(tmp_path, byte_level):
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )
    steps = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ]
    spec = {**byte_level, "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}
    return load_tokenizer(save(tmp_path, spec, "gpt4.json"))


@pytest.mark.timeout(150)  # about 0.3 s on a free core; a quadratic way would take hours
@pytest.mark.parametrize("text", ["a" * 1_500_000, " " * 1_500_000, " " * 1_200_000 + "x"], ids=["a", "spaces", "last"])
def test_megabytes_of_one_character_are_encoded_in_seconds(gpt2, text):
    ids = gpt2.encode(text)
    assert gpt2.decode(ids.tolist()) == text


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_long_text_without_spaces_passes_a_tokenizer_json(tmp_path, request, kind):
    tokenizer = load_tokenizer(save(tmp_path, request.getfixturevalue(kind)))
    text = "a" * 600_000
    assert tokenizer.decode(tokenizer.encode(text).tolist()) == text


# GPT-2's files


def test_a_small_vocabulary_in_the_format_of_gpt2_has_its_separator_at_the_end(gpt2, gpt2_files):
    encoder = json.loads(gpt2_files["encoder.json"])
    assert gpt2.separator == encoder["<|endoftext|>"] == len(encoder) - 1
    assert gpt2.vocab_size == len(encoder)
    assert gpt2.name == "gpt2"


def test_gpt2_gives_the_ids_of_two_other_readers_of_its_files(gpt2, gpt2_folder, gpt2_files, tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    ranks = tiktoken.load.data_gym_to_mergeable_bpe_ranks(
        str(gpt2_folder / "vocab.bpe"), str(gpt2_folder / "encoder.json")
    )
    pattern = tiktoken_ext.openai_public.r50k_pat_str
    theirs = tiktoken.Encoding("theirs", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    merges = [tuple(line.split(" ")) for line in gpt2_files["vocab.bpe"].decode().split("\n")[1:-1]]
    library = hf.Tokenizer(models.BPE(vocab=json.loads(gpt2_files["encoder.json"]), merges=merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for text in library_text(60_000):
        ids = gpt2.encode(text).tolist()
        assert ids == theirs.encode_ordinary(text)
        assert ids == library.encode(text).ids


def test_the_expected_file_is_that_of_tiktoken(monkeypatch):
    given = {}
    monkeypatch.setattr(tiktoken_ext.openai_public, "data_gym_to_mergeable_bpe_ranks", given.update)
    tiktoken_ext.openai_public.gpt2()
    assert (given["vocab_bpe_file"], given["vocab_bpe_hash"]) == (tokenizers.GPT2_URL, tokenizers.GPT2_SHA256)


def test_a_folder_that_lacks_the_file_is_refused(gpt2, gpt2_folder):
    (gpt2_folder / "encoder.json").unlink()
    assert load_tokenizer("gpt2", path=str(gpt2_folder)).fingerprint == gpt2.fingerprint, "it is not needed"
    with pytest.raises(DataError, match=r"must be a folder with vocab\.bpe"):
        load_tokenizer("gpt2", path=str(gpt2_folder / "vocab.bpe"))
    (gpt2_folder / "vocab.bpe").unlink()
    with pytest.raises(DataError, match=r"must be a folder with vocab\.bpe: No such file"):
        load_tokenizer("gpt2", path=str(gpt2_folder))


def test_a_changed_file_is_refused_with_both_hashes(gpt2_folder, gpt2_files):
    changed = gpt2_files["vocab.bpe"] + b"x y\n"
    (gpt2_folder / "vocab.bpe").write_bytes(changed)
    with pytest.raises(DataError) as refused:
        load_tokenizer("gpt2", path=str(gpt2_folder))
    for part in (
        str(gpt2_folder / "vocab.bpe"),
        tokenizers.GPT2_SHA256,
        hashlib.sha256(changed).hexdigest(),
    ):
        assert part in str(refused.value)


# The download


class FileServer(http.server.ThreadingHTTPServer):
    """Serves `files`; `status`, `cut` and `drip_s` make it answer wrongly."""

    def __init__(self, files):
        super().__init__(("127.0.0.1", 0), FileHandler)
        self.files, self.status, self.cut, self.drip_s, self.requests = files, 200, None, None, []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/"


class FileHandler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server, name = self.server, self.path.removeprefix("/")
        server.requests.append(name)
        if server.status != 200:
            self.send_error(server.status)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(server.files[name])))
        self.end_headers()
        body = server.files[name][: server.cut]
        try:
            while server.drip_s is not None and body:
                self.wfile.write(body[:1])
                body = body[1:]
                time.sleep(server.drip_s)
            self.wfile.write(body)
        except OSError:
            pass  # the other side had enough

    def log_message(self, *args):
        pass


@pytest.fixture
def server(gpt2_files, monkeypatch, tmp_path):
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "DATA_GYM_CACHE_DIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")
    with FileServer(dict(gpt2_files)) as running:
        expect(monkeypatch, gpt2_files, running.url)
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def cached(tmp_path):
    return sorted(path.name for path in (tmp_path / "cache").glob("*"))


def test_gpt2_is_downloaded_once_and_then_needs_no_network(server, tmp_path, gpt2, monkeypatch):
    expect(monkeypatch, server.files, server.url)
    first = load_tokenizer("gpt2")
    assert server.requests == ["vocab.bpe"]
    assert first.fingerprint == gpt2.fingerprint
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    second = load_tokenizer("gpt2")
    assert len(server.requests) == 1
    assert second.encode("hello world").tolist() == first.encode("hello world").tolist()
    assert cached(tmp_path) == [hashlib.sha1(tokenizers.GPT2_URL.encode()).hexdigest()]


def test_a_damaged_cache_is_downloaded_again(server, tmp_path):
    load_tokenizer("gpt2")
    for name in cached(tmp_path):
        (tmp_path / "cache" / name).write_bytes(b"half a fi")
    load_tokenizer("gpt2")
    assert server.requests == ["vocab.bpe"] * 2
    load_tokenizer("gpt2")
    assert len(server.requests) == 2


def test_an_empty_cache_name_keeps_nothing(server, tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    monkeypatch.chdir(tmp_path)
    load_tokenizer("gpt2")
    load_tokenizer("gpt2")
    assert len(server.requests) == 2
    assert cached(tmp_path) == []


def test_a_cache_folder_that_cannot_be_written_is_named(server, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match=str(tmp_path / "file" / "cache")):
        load_tokenizer("gpt2")


def refused_download():
    with pytest.raises(DataUnavailableError) as refused:
        load_tokenizer("gpt2")
    message = str(refused.value)
    assert tokenizers.GPT2_URL in message
    assert "data.tokenizer_path=FOLDER" in message
    assert "data.tokenizer=bytes" in message
    return message


@pytest.mark.parametrize("status", [404, 503])
def test_a_server_that_refuses_says_how_to_get_the_file(server, tmp_path, status):
    server.status = status
    assert f"{status} " in refused_download()
    assert cached(tmp_path) == []


def test_a_machine_without_network_says_how_to_get_the_file(server, monkeypatch):
    expect(monkeypatch, server.files, "http://127.0.0.1:1/")
    assert "refused" in refused_download()


def test_a_truncated_download_of_a_vocabulary_is_refused(server, tmp_path):
    server.cut = 1000
    assert "1000 bytes read" in refused_download()
    assert cached(tmp_path) == []


def test_a_server_that_sends_byte_by_byte_is_given_up(server, monkeypatch):
    monkeypatch.setattr(tokenizers, "DOWNLOAD_TIMEOUT_S", 0.3)
    server.drip_s = 0.05
    assert "not finished after 0.3 s" in refused_download()


def test_a_download_with_another_hash_is_refused_and_not_kept(server, tmp_path, monkeypatch):
    server.files["vocab.bpe"] = b"something else"
    expected = tokenizers.GPT2_SHA256
    with pytest.raises(DataError, match=f"vocab.bpe.*expected {expected}"):
        load_tokenizer("gpt2")
    assert cached(tmp_path) == []
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")  # without a cache tiktoken checks nothing
    with pytest.raises(DataError, match=f"{expected}, found {hashlib.sha256(b'something else').hexdigest()}"):
        load_tokenizer("gpt2")


@pytest.mark.parametrize(("variable", "value"), [("HF_HUB_OFFLINE", "1"), ("TRANSFORMERS_OFFLINE", "true")])
def test_offline_mode_tries_no_download(server, monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    assert "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set" in refused_download()
    assert server.requests == []


# tokenizer.json


def test_a_folder_stands_for_the_tokenizer_json_in_it(tmp_path, byte_level):
    file = save(tmp_path, byte_level)
    by_folder = load_tokenizer(str(tmp_path))
    assert by_folder.name == str(tmp_path)
    assert by_folder.fingerprint == load_tokenizer(file).fingerprint


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "unigram", "words"])
def test_text_that_looks_like_a_special_token_stays_text(tmp_path, request, kind):
    if kind == "words":
        vocabulary = {token: i for i, token in enumerate(["[UNK]", "[SEP]", "a", "[", "]", "S", "E", "P"])}
        library = hf.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        library.add_special_tokens(["[SEP]", "[UNK]"])
        spec = json.loads(library.to_str())
    else:
        spec = request.getfixturevalue(kind)
    tokenizer = load_tokenizer(save(tmp_path, spec))
    for special in spec["added_tokens"]:
        if "unk" in special["content"].lower():
            continue
        ids = tokenizer.encode(f"a {special['content']} a").tolist()
        assert special["id"] not in ids
        assert special["content"] in tokenizer.decode(ids).replace(" ", "")
        assert special["id"] not in tokenizer.encode(f"a {WIDE}{special['content']}").tolist()
        assert tokenizer.byte_lengths[special["id"]] == 0


def test_a_separator_that_is_an_ordinary_word_never_comes_from_text(tmp_path, byte_level):
    tokenizer = load_tokenizer(save(tmp_path, byte_level), separator="Ġreturn")
    ids = tokenizer.encode("if so: return None").tolist()
    assert tokenizer.separator not in ids
    assert tokenizer.decode(ids) == "if so: return None"
    assert tokenizer.byte_lengths[ids].sum() == len("if so: return None")
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.fingerprint == tokenizer.fingerprint
    assert copy.decode([copy.separator, *ids]) == "if so: return None"


def test_the_names_of_special_tokens_are_encoded_like_any_other_text(tmp_path, byte_level):
    plain = hf.Tokenizer.from_str(json.dumps({**byte_level, "added_tokens": []}))
    text = "print(<|endoftext|>)<|pad|>"
    assert load_tokenizer(save(tmp_path, byte_level)).encode(text).tolist() == plain.encode(text).ids


def test_an_unknown_word_stays_visible_as_one(tmp_path):
    library = hf.Tokenizer(models.WordLevel({"[UNK]": 0, "[SEP]": 1, "a": 2}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["[UNK]", "[SEP]"])
    tokenizer = load_tokenizer(save(tmp_path, json.loads(library.to_str())))
    assert tokenizer.encode("a zzz a").tolist() == [2, 0, 2]
    assert tokenizer.byte_lengths.tolist() == [0, 0, 1]


def test_truncation_padding_and_dropout_of_a_tokenizer_file_are_disabled(tmp_path, byte_level):
    library = hf.Tokenizer.from_str(json.dumps(byte_level))
    library.enable_truncation(5)
    library.enable_padding(length=4000, pad_id=1, pad_token="<|pad|>")
    library.post_processor = hf.processors.TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    spec = json.loads(library.to_str())
    plain, padded = load_tokenizer(save(tmp_path, byte_level)), load_tokenizer(save(tmp_path, spec))
    text = library_text(3000)[0]
    assert len(plain.encode(text)) > 5
    assert padded.encode(text).tolist() == plain.encode(text).tolist()
    assert padded.fingerprint == plain.fingerprint
    spec["model"]["dropout"] = 0.9
    assert load_tokenizer(save(tmp_path, spec)).encode(text).tolist() == plain.encode(text).tolist()


def test_files_that_encode_alike_are_found_to_however_they_are_written(tmp_path, byte_level):
    """As earlier versions of the library and transformers write the same vocabulary."""
    plain = load_tokenizer(save(tmp_path, byte_level))
    old = json.loads(json.dumps(byte_level))
    old["model"]["merges"] = [" ".join(pair) for pair in old["model"]["merges"]]
    for key in ("dropout", "unk_token", "fuse_unk", "byte_fallback", "ignore_merges"):
        old["model"].pop(key, None)
    old["added_tokens"] = [token | {"normalized": True, "rstrip": True} for token in old["added_tokens"]]
    old |= {"truncation": {"max_length": 8, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}}
    (tmp_path / "old.json").write_text(json.dumps(old, indent=2, sort_keys=True))
    written = load_tokenizer(str(tmp_path / "old.json"))
    text = library_text(3000)[0]
    assert written.encode(text).tolist() == plain.encode(text).tolist()
    assert written.encodes_like(plain)
    assert written.fingerprint != plain.fingerprint, "of the file, whatever version of the library reads it"
    old["model"]["merges"].reverse()
    (tmp_path / "old.json").write_text(json.dumps(old))
    assert not load_tokenizer(str(tmp_path / "old.json")).encodes_like(plain)
    assert not load_tokenizer("bytes").encodes_like(plain)
    assert not plain.encodes_like(load_tokenizer("bytes"))
    spec = json.loads(hf.Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a")).to_str())
    listed = hf.Tokenizer.from_str(json.dumps(spec))
    listed.add_special_tokens(["</s>"])  # as transformers does with the token that ends a text
    same = [load_tokenizer(save(tmp_path, content)) for content in (spec, json.loads(listed.to_str()))]
    assert same[0].encodes_like(same[1])


def test_lengths_of_a_word_piece_vocabulary_leave_the_mark_out(tmp_path):
    vocabulary = {token: i for i, token in enumerate(["[UNK]", "[SEP]", "un", "##like", "##ly", "é"])}
    library = hf.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = load_tokenizer(save(tmp_path, json.loads(library.to_str())))
    assert tokenizer.byte_lengths.tolist() == [0, 0, 2, 4, 2, 2]
    assert tokenizer.encode("unlikely é zzz").tolist() == [2, 3, 4, 5, 0]


def test_added_words_that_are_not_special_are_counted_as_they_are_written(tmp_path, byte_level):
    library = hf.Tokenizer.from_str(json.dumps(byte_level))
    library.add_tokens(["<ü>"])
    tokenizer = load_tokenizer(save(tmp_path, json.loads(library.to_str())))
    ids = tokenizer.encode("a <ü> b")
    assert tokenizer.vocab_size - 1 in ids
    assert tokenizer.byte_lengths[ids].sum() == len("a <ü> b".encode())


@pytest.mark.parametrize("token", ["<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "</s>", "<eos>", "[SEP]"])
def test_the_separator_is_found_by_its_usual_names(tmp_path, token):
    spec = json.loads(hf.Tokenizer(models.WordLevel({"a": 0, token: 1}, unk_token="a")).to_str())
    assert load_tokenizer(save(tmp_path, spec)).separator == 1


def test_a_separator_must_be_a_token_and_must_be_known(tmp_path, byte_level):
    file = save(tmp_path, byte_level)
    assert load_tokenizer(file, separator="<|pad|>").separator == 1
    with pytest.raises(ConfigError, match=r"data.separator: '<none>' is not a token of"):
        load_tokenizer(file, separator="<none>")
    spec = json.loads(hf.Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).to_str())
    with pytest.raises(ConfigError, match=r"set data\.separator"):
        load_tokenizer(save(tmp_path, spec))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"model": 3}',
        b'{"model": {"type": "Nothing"}}',
        b"[" * 100_000,
        b'{"model": {"type": "WordLevel", "vocab": {"</s>": 0, "a": 2000000000}, "unk_token": "a"}}',
        b'{"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "model": '
        b'{"type": "WordLevel", "vocab": {"</s>": 0}, "unk_token": "a"}}',  # the library panics
    ],
)
def test_a_broken_tokenizer_json_is_refused_by_its_name(tmp_path, content):
    (tmp_path / "broken.json").write_bytes(content)
    with pytest.raises(DataError, match=r"broken\.json: "):
        load_tokenizer(str(tmp_path / "broken.json"))


@pytest.mark.parametrize("value", ["x", [1], {"a": 1}, -1, 10**9])
@pytest.mark.parametrize("key", ["unk_id", "end_of_word_suffix", "continuing_subword_prefix"])
def test_keys_that_the_library_ignores_change_nothing(tmp_path, key, value):
    vocabulary = {"a": 0, "</s>": 1}
    model = models.BPE(vocabulary, []) if key == "unk_id" else models.WordLevel(vocabulary, unk_token="none")
    spec = json.loads(hf.Tokenizer(model).to_str())
    spec["model"][key] = value
    assert load_tokenizer(save(tmp_path, spec)).byte_lengths.tolist() == [1, 0]


def test_a_decoder_at_which_the_library_panics_is_an_error_with_its_name(tmp_path):
    spec = json.loads(hf.Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a")).to_str())
    spec["decoder"] = {"type": "Strip", "content": "a", "start": 5, "stop": 5}
    with pytest.raises(DataError, match=r"tokenizer\.json: cannot decode"):
        load_tokenizer(save(tmp_path, spec)).decode([0])


def test_a_text_that_a_vocabulary_cannot_hold_is_an_error_with_its_name(tmp_path):
    library = hf.Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="<unk>"))
    tokenizer = load_tokenizer(save(tmp_path, json.loads(library.to_str())))
    with pytest.raises(DataError, match=r"tokenizer\.json: cannot encode"):
        tokenizer.encode("b")


# Choosing one


@pytest.mark.parametrize("name", ["no-such", "GPT2", "some/model", "x" * 5000, "~nobody-at-all/x"])
def test_an_unknown_name_lists_what_is_possible(name):
    with pytest.raises(ConfigError, match=r"data\.tokenizer: ") as refused:
        load_tokenizer(name)
    for possible in ("use 'bytes'", "'gpt2'", "tokenizer.json"):
        assert possible in str(refused.value)


def test_a_path_without_a_file_is_refused_by_its_name(tmp_path):
    with pytest.raises(DataError, match=r"data.tokenizer: there is no file .*missing\.json"):
        load_tokenizer(str(tmp_path / "missing.json"))
    with pytest.raises(DataError, match=r"data.tokenizer: there is no file .*tokenizer\.json"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "options", "field"),
    [
        ("bytes", {"separator": "x"}, "data.separator"),
        ("gpt2", {"separator": "x"}, "data.separator"),
        ("bytes", {"path": "x"}, "data.tokenizer_path"),
        ("x.json", {"path": "x"}, "data.tokenizer_path"),
    ],
)
def test_options_of_another_tokenizer_are_refused(name, options, field):
    with pytest.raises(ConfigError, match=f"{field}: "):
        load_tokenizer(name, **options)


# Fingerprints


def test_a_fingerprint_follows_the_vocabulary_and_the_separator_and_not_the_path(tmp_path, byte_level):
    (tmp_path / "elsewhere").mkdir()
    original = load_tokenizer(save(tmp_path, byte_level))
    assert load_tokenizer(save(tmp_path / "elsewhere", byte_level)).fingerprint == original.fingerprint
    other_separator = load_tokenizer(save(tmp_path, byte_level), separator="<|pad|>")
    merges = byte_level["model"]["merges"]
    swapped = {**byte_level, "model": {**byte_level["model"], "merges": [merges[1], merges[0], *merges[2:]]}}
    other_merges = load_tokenizer(save(tmp_path, swapped))
    lower = {**byte_level, "normalizer": {"type": "Lowercase"}}
    other_rule = load_tokenizer(save(tmp_path, lower))
    all_of_them = [original, other_separator, other_merges, other_rule, load_tokenizer("bytes")]
    assert len({t.fingerprint for t in all_of_them}) == 5
    assert all(len(t.fingerprint) == 64 and set(t.fingerprint) <= set(string.hexdigits) for t in all_of_them)


def test_the_fingerprint_of_gpt2_follows_its_merges(gpt2, gpt2_files):
    ranks = tokenizers._gpt2_ranks(gpt2_files["vocab.bpe"].decode())
    assert tokenizers.GPT2Tokenizer(ranks).fingerprint == gpt2.fingerprint
    last, before = (max(ranks, key=ranks.get), len(ranks) - 2)
    other = next(token for token, i in ranks.items() if i == before)
    assert tokenizers.GPT2Tokenizer({**ranks, last: before, other: before + 1}).fingerprint != gpt2.fingerprint
    del ranks[last]
    assert tokenizers.GPT2Tokenizer(ranks).fingerprint != gpt2.fingerprint


def test_the_fingerprint_of_bytes_never_changes():
    found = load_tokenizer("bytes").fingerprint
    assert found == "6c63b1da4d2959f08c6903591e908d0b11398926b939e8e9dfbcafdb126d187f"
