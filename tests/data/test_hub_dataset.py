"""Any dataset repository with parquet files: from a hub on this machine, from its cache and from a mirror."""

import shutil
import warnings

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from nsa.cli.main import app
from nsa.config.load import ConfigWarning, differences, parse_config, warn_if_unlikely
from nsa.config.schema import Config, DataConfig, TrainConfig
from nsa.data.build import build_data
from nsa.data.sources.registry import open_source
from nsa.data.tokenizers import ByteTokenizer
from nsa.errors import ConfigError, DataError, DataUnavailableError
from tests.data.hub_server import HubServer, download
from tests.data.mirror import fineweb_edu, texts_of, write_mirror

REPO = "someone/stories"
TRAIN = TrainConfig(seq_len=48, batch_size=4, seed=11, eval_sequences=4)
CARD = """---
configs:
- config_name: long
  data_files: [{split: train, path: long/train-*}, {split: test, path: long/test-*}]
- config_name: short
  data_files: [{split: train, path: short/*}]
---
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A folder, and the texts of each split."""
    folder, texts = tmp_path_factory.mktemp("repository"), {}
    (folder / "README.md").write_text(CARD)
    for name in ("long/train-0", "long/train-1", "long/test-0", "short/all"):
        (folder / name).parent.mkdir(exist_ok=True)
        texts[name] = [f"{name} {i}: " + "once upon a time " * (i % 7) for i in range(60)]
        columns = {"story": texts[name], "words": [3] * 60, "tags": [{"kind": "x"}] * 60, "lines": [["a"]] * 60}
        pq.write_table(pa.table(columns), folder / f"{name}.parquet", row_group_size=20)
    return folder, {**texts, "long": texts["long/train-0"] + texts["long/train-1"]}


@pytest.fixture
def server(repository, hub_settings, monkeypatch):
    with HubServer(repository[0], repo=REPO) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        yield running


def opened(**more):
    return open_source(
        DataConfig(**{"source": "hub", "repo": REPO, "subset": "long", "text_field": "story"} | more), 10.0
    )


def test_hub_mirror_and_cache_give_the_same_documents(server, repository, tmp_path, monkeypatch):
    folder, texts = repository
    online, mirror = opened(), opened(paths=[str(folder)], repo=None)
    assert texts_of(online) == texts_of(mirror) == texts["long"]
    assert online.units() == mirror.units()
    assert (online.name, online.commit, mirror.commit) == (f"{REPO} long", server.branches["main"], None)
    assert texts_of(opened(split="test")) == texts["long/test-0"]
    assert texts_of(opened(paths=[str(folder / "short" / "all.parquet")])) == texts["short/all"], "a file is a file"
    download(server, tmp_path / "home", ["README.md", "long/train-*"])
    requests = len(server.log)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    cached = opened()
    assert texts_of(cached) == texts["long"]
    assert (cached.fingerprint(), cached.commit) == (online.fingerprint(), online.commit)
    with pytest.raises(DataUnavailableError, match=r"lacks files of.*--include \"README.md\" \"short/\*\"`"):
        opened(subset="short").units()
    assert len(server.log) == requests


def test_offline_without_a_download_the_readme_is_asked_for(server, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataUnavailableError, match=rf"{REPO}, long: offline mode is on.*--include \"README.md\""):
        opened().units()
    assert not server.log


def test_fineweb_edu_is_a_preset_of_it(tmp_path, hub_settings, monkeypatch):
    """The same files by the repository's README as by the preset: the same fingerprint and the same batches."""
    write_mirror(tmp_path, files=2, row_groups=3, rows=20)
    patterns = "- config_name: sample-10BT\n  data_files: [{split: train, path: sample/10BT/*}]"
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{patterns}\n---\n")
    with HubServer(tmp_path) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        general = {"source": "hub", "repo": running.repo, "subset": "sample-10BT"}
        built = [
            build_data(DataConfig(**source), TRAIN, ByteTokenizer()) for source in ({"source": "fineweb_edu"}, general)
        ]
        assert built[0].fingerprint == built[1].fingerprint
        for number in range(3):
            batches = [data.train.batch(4 * number, 4) for data in built]
            assert batches[0].inputs.tolist() == batches[1].inputs.tolist()
        for data in built:
            data.close()


def test_the_fingerprint_of_fineweb_edu_is_that_of_earlier_versions(tmp_path):
    """Recorded before there was any other repository; checkpoints hold it."""
    for name in ("sample/10BT/000_00000", "sample/10BT/001_00000", "data/CC-MAIN-2024-10/000_00000"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.parquet").write_bytes(b"x" * len(name))
    for folders, expected in (
        ([""], "ff7cefbbfcd42a3c5f0fed86bd4d2c72362d5f96d8f24d39649225f7d99e1769"),
        (["sample"], "b70c9848a67ebdd8059e8dd47e894b5047eb662f8809506831cf21e466b910c9"),
        (
            ["sample/10BT", "data/CC-MAIN-2024-10"],
            "16b4cee7381efd3441742f14defe3512d5ce431742b0bef0fe4ae4da5bcd6536",
        ),
    ):
        assert fineweb_edu(paths=[str(tmp_path / folder) for folder in folders]).fingerprint() == expected


@pytest.mark.parametrize(
    ("column", "error"),
    [
        ("text", "long/test-0.parquet: no column 'text'; it has story, words, tags, lines; set data.text_field to the"),
        ("words", "column 'words' must be a text, its type is int64; .*columns of text: story"),
        ("tags", "column 'tags' must be a text, its type is struct<kind: string>"),
        ("lines", "column 'lines' must be a text, its type is list<element: string>"),
        (
            "tags.kind",
            "no column 'tags.kind'; it has .*; a field inside 'tags' cannot be read, only a column of text can",
        ),
    ],
)
def test_a_column_without_text_is_refused_by_name(server, column, error):
    with pytest.raises(DataError, match=error):
        opened(split="test", text_field=column).units()


def test_a_repository_without_parquet_files_is_refused_with_what_to_try(tmp_path, hub_settings, monkeypatch):
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository" / "a.jsonl").write_text("{}")
    with HubServer(tmp_path / "repository", repo=REPO) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        error = rf"{REPO} at main: no \.parquet file matches \*\.parquet; try data\.revision=refs/convert/parquet"
        with pytest.raises(DataError, match=error):
            opened(subset="default").units()


def test_a_repository_that_does_not_exist_is_named(server):
    with pytest.raises(DataError, match=r"there is no someone/storys: check"):
        opened(repo="someone/storys").units()


def test_mixtures_and_commands_read_it(server, repository, tmp_path):
    part = {"source": "hub", "repo": REPO, "text_field": "story"}
    config = parse_config({"data": {"mixture": [part | {"subset": "long"}, part | {"subset": "short"}]}}, "test")
    mixed = build_data(config.data, TRAIN, ByteTokenizer())
    mixed.train.batch(0, 4)
    mixed.close()
    assert set(mixed.train.sequences.shares(100)) == {f"{REPO} long", f"{REPO} short"}
    arguments = ["data.source=hub", f"data.repo={REPO}", "data.subset=long", "data.text_field=story"]
    stats = CliRunner().invoke(app, ["data", "stats", *arguments], catch_exceptions=False)
    assert f"{REPO} long: 2 files: 120 documents" in stats.output
    prepared = CliRunner().invoke(
        app, ["data", "prepare", str(tmp_path / "shards"), *arguments, "--workers", "1"], catch_exceptions=False
    )
    assert "120 documents" in prepared.output
    file = tmp_path / "run.yaml"
    file.write_text(f"data: {{source: hub, repo: {REPO}, subset: long, text_field: story}}")
    assert CliRunner().invoke(app, ["config", "check", str(file)], catch_exceptions=False).exit_code == 0


def test_the_lengths_of_a_mixture_are_not_written_through_a_link(repository, tmp_path):
    part = {"source": "hub", "subset": "long", "text_field": "story", "paths": [str(repository[0])]}
    data = DataConfig(mixture=[part, part | {"subset": "short"}])
    (tmp_path / "outside").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    built = build_data(data, TRAIN, ByteTokenizer(), tmp_path / "link")
    built.train.batch(0, 4)
    built.close()
    for number in (0, 1):
        assert list((tmp_path / "run" / f"data_index_{number}").iterdir()), "the folder itself may be a link"
        shutil.rmtree(tmp_path / "run" / f"data_index_{number}")
    (tmp_path / "run" / "data_index_1").symlink_to(tmp_path / "outside")
    with pytest.raises(DataError, match=r"data_index_1: cannot be used: it is a symbolic link; remove it"):
        build_data(data, TRAIN, ByteTokenizer(), tmp_path / "link")
    assert not list((tmp_path / "outside").iterdir())


def test_a_checkpoint_of_a_version_without_its_keys_resumes():
    mixture = [{"source": "fineweb_edu", "weight": 2.0}, {"source": "text", "paths": ["books"]}]
    for data in ({"source": "fineweb_edu"}, {"mixture": mixture}):
        config = parse_config({"data": data}, "test")
        stored = config.to_dict()
        for section in (stored["data"], *stored["data"]["mixture"]):
            del section["repo"], section["split"]
        assert differences(stored, config) == []


def test_readiness_checks_can_put_synthetic_text_in_its_place():
    config = Config(data=DataConfig(source="hub", repo=REPO, subset="long"))
    changed = parse_config(config.to_dict(), "again", ["data.source=synthetic", "data.paths=[]", "data.mixture=[]"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_unlikely(changed, "again")


def test_the_subset_is_the_default_one_where_none_is_named():
    assert DataConfig(source="hub", repo=REPO).subset == "default"
    assert DataConfig(source="fineweb_edu").subset == DataConfig().subset == "sample-10BT"
    assert parse_config(Config(data=DataConfig(source="hub", repo=REPO)).to_dict(), "again").data.subset == "default"


@pytest.mark.parametrize("repo", ["https://huggingface.co/datasets/a/b", "a/b/c", "../a", "a b"])
def test_a_repository_is_named_as_owner_and_name(repo):
    with pytest.raises(ConfigError, match=r"data\.repo: write it as OWNER/NAME"):
        parse_config({"data": {"source": "hub", "repo": repo}}, "test")


def test_a_repository_that_no_source_reads_is_a_warning():
    with pytest.warns(ConfigWarning, match=r"data\.repo: 'a/b' is not used, since data\.source is python; set"):
        warn_if_unlikely(parse_config({"data": {"repo": "a/b"}}, "test"), "test")
