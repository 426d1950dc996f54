"""What checkpoints and prepared shards of earlier versions rely on: the order of tokens and the fingerprints of data.

The values were recorded before nsa/data was restructured. A change of any of them means that an old checkpoint would
resume on other data, or that its data would be refused.
"""

import hashlib
import json
import os

import pytest

from nsa.config.schema import DataConfig, TrainConfig
from nsa.data.build import build_data
from nsa.data.lanes import LengthIndex
from nsa.data.prepare import prepare
from nsa.data.sources.text import TextSource
from nsa.data.tokenizers import ByteTokenizer, GPT2Tokenizer, load_tokenizer
from tests.data.corpora import write_texts
from tests.data.mirror import fineweb_edu, write_mirror

TRAIN = TrainConfig(seq_len=48, batch_size=6, seed=11, eval_sequences=4)

# Of each kind of data: the fingerprint (None where it depends on the size of parquet files, which pyarrow decides), and
# the SHA-256 of training and validation batches.
EXPECTED = {
    "synthetic": (
        "5bfd713229cd02c86908026ae03cd970adeb74eefcbcf559cec49ae70b8f4e02",
        "c95e8c57647a4573427208a4e7827798",
        "b5d0e87b6383babc2b2e7b83adcae350",
    ),
    "text": (
        "fd7330406a65a3763e19b5ff843cc5e71f3a17031f245522b6f19a563b1417d3",
        "18f0c23ea9c9789c57bfbc0dd95bc46b",
        "cc95797c5d631a34c01f285d7cf76214",
    ),
    "text, best fit": (
        "fd7330406a65a3763e19b5ff843cc5e71f3a17031f245522b6f19a563b1417d3",
        "77ae13c11b69f80dad8b5c9cebf7cfbc",
        "02d9c7ea3c23fb0a3faca99c262c06aa",
    ),
    "prepared": (
        "63451ec84170e5bc33654ac47537bfd66835fa4a83c998d2b4bb139e55ab7b8b",
        "8788b40351397e05ea9ac5e1a6c13c64",
        "31ddc62696e7688ddeb5fef4ca2920fd",
    ),
    "prepared, not isolated": (
        "63451ec84170e5bc33654ac47537bfd66835fa4a83c998d2b4bb139e55ab7b8b",
        "26619a2f229273859003bbc91d316068",
        "61f9106f215e4cf574647e325b141538",
    ),
    "megatron": (
        "f8fd994f9d9176ee2926c0a7d7d645ba900172e73403c5929bd380c6e0f41630",
        "8788b40351397e05ea9ac5e1a6c13c64",  # as prepared
        "31ddc62696e7688ddeb5fef4ca2920fd",
    ),
    "streamed": (None, "768aa548e796981e2d4b7cba422ab3f8", "a80451baca0ff8592475838b8775e05b"),
    "mixture": (None, "72111a60d844743f18ac043d6be34167", "9586ff7b40fa4ade484e1af948d7bf90"),
    "mixture without a stream": (
        "d8143a9f9ced4c4dfa6eeebef35134899cbc6c68e17bb498ff4accf7bfc832a2",
        "5c237023a1b1018502856e698792228f",
        "6ef85c81d27254eceb53177fd7740dc9",
    ),
}
MANIFEST = {
    "format": "nsa-shards",
    "version": 1,
    "plan": "d7d20846d53b5d3655700304e0959dc5d2c5956ecdd283922a15f457c1a2334a",
    "source": "text",
    "tokenizer": {
        "name": "bytes",
        "fingerprint": "6c63b1da4d2959f08c6903591e908d0b11398926b939e8e9dfbcafdb126d187f",
        "vocab_size": 256,
        "separator": 255,
        "dtype": "uint8",
    },
    "documents": 200,
    "tokens": 52075,
    "text_bytes": 51875,
    "skipped": {},
}
FIRST_SHARD = {
    "number": 0,
    "plan": "d7d20846d53b5d3655700304e0959dc5d2c5956ecdd283922a15f457c1a2334a",
    "documents": 63,
    "tokens": 13430,
    "text_bytes": 13367,
    "tokens_sha256": "b4ded235cb213e55faff4deeecd1ef3aa330b035e506173203ca0c5af09c9b12",
    "docs_sha256": "a28fb52a959243f69ef24d8e6cf337870c9556387aaf39c3401da1cbc4b4e7e1",
    "skipped": {},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the plan of a preparation holds paths and times of its files
    lines = [json.dumps({"text": f"{n} wörter " * (3 + n % 40)}, ensure_ascii=False) for n in range(300)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:200]) + "\n", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text("\n".join(lines[200:]) + "\n", encoding="utf-8")
    write_mirror(tmp_path / "mirror", files=2, row_groups=4, rows=30)
    os.utime("a.jsonl", ns=(10**18, 10**18))
    source = TextSource(["a.jsonl"], range_bytes=7000)
    prepare(source, ByteTokenizer(), tmp_path / "shards", workers=1, shard_bytes=20_000)
    return tmp_path


def read_texts(path):
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def data_section(kind, folder):
    text = {"source": "text", "paths": [str(folder / "b.jsonl"), str(folder / "a.jsonl")]}
    prepared = {"source": "prepared", "paths": [str(folder / "shards")]}
    streamed = {"source": "fineweb_edu", "paths": [str(folder / "mirror")]}
    return {
        "synthetic": {"source": "synthetic"},
        "text": text,
        "text, best fit": {**text, "packing": "best_fit"},
        "prepared": prepared,
        "prepared, not isolated": {**prepared, "isolate_documents": False},
        "megatron": write_texts("megatron", folder / "corpus", read_texts(folder / "a.jsonl")),
        "streamed": streamed,
        "mixture": {"mixture": [{**text, "weight": 2.0}, {**prepared, "weight": 0.5}, {**streamed, "weight": 1.0}]},
        "mixture without a stream": {"mixture": [{**text, "weight": 2.0}, {**prepared, "weight": 0.5}]},
    }[kind]


def digest(loader, numbers):
    found = hashlib.sha256()
    for first in numbers:
        batch = loader.batch(first, 3, 2)
        for tensor in (batch.inputs, batch.targets, *([] if batch.cu_seqlens is None else [batch.cu_seqlens])):
            found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode() + tensor.numpy().tobytes())
        found.update(str(loader.sequences.num_targets(range(first, first + 3))).encode())
    return found.hexdigest()[:32]


@pytest.mark.parametrize("kind", EXPECTED)
def test_a_checkpoint_written_before_reads_on_in_the_same_tokens(folder, kind):
    section = DataConfig.model_validate({**data_section(kind, folder), "validation_fraction": 0.1})
    data = build_data(section, TRAIN, ByteTokenizer())
    far = range(0, 4000, 91)  # several epochs
    fingerprint, training, validation = EXPECTED[kind]
    assert digest(data.train, far) == training
    assert digest(data.validation, range(0, 60, 7)) == validation
    assert fingerprint in (None, data.fingerprint)
    data.close()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (
            "37cf6276dc4df72719cdfadccb2306a4b3f4ffe8756a693532bdb4820533a01e",
            "247940dba8048fb5e3a7a5e5d68d5b20",
            "f3f0f0dcc4d6126b28c19bef4468e980",
        )),
        ({"task": "tracking"}, (
            "d8a5907d03bec6bd1a0d7c2e9d79f6187f972f4f958d9f206701e45927f60944",
            "3bd179a7a64318e7894ab4483904017a",
            "f6a8008105c5e9d58b346270b634096e",
        )),
        ({"task": "counting"}, (
            "ade1b2cff2c67b65e93231772f14b363e64c5750b9c9346898a9dda3c330fe4c",
            "ea7580f3f58fdfd836ed690ec7662b67",
            "a7ef7d1ec9b5b8229d0bd4052d7ce42e",
        )),
    ],
    ids=["pairs", "tracking", "counting"],
)  # fmt: skip
def test_recall_documents_change_with_the_number_of_their_version_alone(settings, expected):
    """Other documents need another `version`: a run would go on in them as if they were its own."""
    train = TRAIN.model_copy(update={"seq_len": 1024})  # with all lengths from sequence 5,120 on
    section = DataConfig.model_validate({"source": "recall", "validation_fraction": 0.1, **settings})
    data = build_data(section, train, ByteTokenizer())
    found = data.fingerprint, digest(data.train, range(0, 8000, 500)), digest(data.validation, range(0, 60, 7))
    assert found == expected


def test_the_index_of_a_streamed_run_is_still_read(folder):
    """Lengths that an earlier version wrote beside the run: a wrong one would be noticed as a changed file."""
    index = LengthIndex(folder, 3, "fingerprint")
    index.put(5, 1234)
    path = folder / "data_index_rank3.txt"
    assert path.read_text() == "lengths fingerprint\n5 1234 9e132706\n"
    assert LengthIndex(folder, 0, "fingerprint").lengths[5] == 1234
    path.unlink()  # by somebody, while the run goes on
    index.put(6, 99)
    assert LengthIndex(folder, 0, "fingerprint").lengths[6] == 99


def test_prepared_shards_have_the_format_that_earlier_versions_wrote(folder):
    manifest = json.loads((folder / "shards" / "manifest.json").read_text())
    shards = manifest.pop("shards")
    assert manifest == MANIFEST
    assert shards[0] == FIRST_SHARD
    for name, field in (("shard-00000.tokens", "tokens_sha256"), ("shard-00000.docs", "docs_sha256")):
        assert hashlib.sha256((folder / "shards" / name).read_bytes()).hexdigest() == shards[0][field]
    assert list(manifest) == list(MANIFEST)


def test_the_fingerprint_of_a_tokenizer_json_never_changes(tmp_path):
    vocabulary = {"</s>": 0, "a": 1, "b": 2}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "a"}
    added = {"content": "</s>", "id": 0, "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    spec = {
        "version": "1.0",
        "added_tokens": [added | flags],
        "normalizer": None,
        "pre_tokenizer": None,
        "model": model,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    assert (
        load_tokenizer(str(tmp_path)).fingerprint == "68a22273d116e0822fa4bb376b019941218b83df9f43945b8fc5cb3c3972baad"
    )


def test_the_fingerprint_of_a_gpt2_vocabulary_never_changes():
    ranks = {**{bytes([b]): b for b in range(256)}, b"th": 256, b"the": 257}
    assert GPT2Tokenizer(ranks).fingerprint == "b14cd6422185c2ae17fd01f26620ddebcc8a224213ae7d7e41b9e2ead541e33b"


def test_the_fingerprint_of_a_mirror_is_made_of_names_sizes_and_content_ids(folder):
    found = hashlib.sha256()
    for path in sorted((folder / "mirror/sample/10BT").iterdir()):
        found.update(f"sample/10BT/{path.name}\0{path.stat().st_size}\0\n".encode())
    assert fineweb_edu(paths=[str(folder / "mirror")]).fingerprint() == found.hexdigest()
