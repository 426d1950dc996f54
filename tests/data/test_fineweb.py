"""FineWeb-Edu from a hub on this machine, from its local cache and from a mirror: the same documents, few bytes."""

import pickle
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from nsa.config.schema import DataConfig, TrainConfig
from nsa.data.build import build_data
from nsa.data.sources.base import Skipped
from nsa.data.tokenizers import ByteTokenizer
from nsa.errors import DataError, DataUnavailableError
from tests.data.hub_server import REPO, HubServer, download
from tests.data.mirror import FIRST, SCHEMA, fineweb_edu, texts_of, write_mirror


def test_the_hub_gives_the_documents_and_units_that_a_mirror_on_disk_gives(served, mirror):
    server, texts = served
    hub, disk = fineweb_edu(), fineweb_edu(paths=[str(mirror[0])])
    assert texts_of(hub) == texts_of(disk) == texts
    assert hub.units() == disk.units()
    assert [(u.path, u.part) for u in hub.units()][:5] == [(FIRST, i) for i in range(4)] + [
        (FIRST[:14] + "1" + FIRST[15:], 0)
    ]
    assert hub.commit == server.branches["main"]
    assert disk.commit is None
    assert hub.waiting_for() is None


@pytest.mark.parametrize(("subset", "files"), [("CC-MAIN-2024-10", 2), ("default", 2), ("sample-10BT", 3)])
def test_a_subset_is_its_folder(served, mirror, subset, files):
    hub, disk = fineweb_edu(subset), fineweb_edu(subset, paths=[str(mirror[0])])
    assert len({unit.path for unit in hub.units()}) == files
    assert texts_of(hub) == texts_of(disk)


def test_only_footers_and_the_text_of_row_groups_are_fetched(tmp_path, hub_settings, monkeypatch):
    texts = write_mirror(tmp_path, files=2, row_groups=5, rows=500, fat=1000)
    with HubServer(tmp_path) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        source = fineweb_edu()
        units = source.units()
        assert [r.sent for r in server.requests("cdn")] == [64 << 10] * 2, "a tail of each file"
        assert len(server.requests("hub", "/resolve/")) == 2
        for path in sorted(tmp_path.rglob("*.parquet")):
            metadata = pq.read_metadata(path)
            for group in range(5):
                before = len(server.log)
                unit = units.pop(0)
                assert list(source.documents(unit, Skipped())) == [texts.pop(0) for _ in range(500)]
                (request,) = [request for request in server.log[before:] if request.side == "cdn"]
                assert request.sent == metadata.row_group(group).column(0).total_compressed_size
        needed = sum(
            metadata.row_group(g).column(0).total_compressed_size
            for metadata in map(pq.read_metadata, tmp_path.rglob("*.parquet"))
            for g in range(5)
        ) + sum(pq.read_metadata(path).serialized_size for path in tmp_path.rglob("*.parquet"))
        served = sum(r.sent for r in server.log)
        assert served < 2 * needed
        assert served < sum(path.stat().st_size for path in tmp_path.rglob("*.parquet")) / 3


def test_a_footer_is_fetched_once(tmp_path, hub_settings, monkeypatch):
    texts = write_mirror(tmp_path, files=1, row_groups=80, rows=2)
    size = pq.read_metadata(tmp_path / FIRST).serialized_size
    assert size > 64 << 10, "more than arrow reads first"
    with HubServer(tmp_path) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        assert texts_of(fineweb_edu()) == texts
        assert [r.sent for r in server.requests("cdn")][:2] == [64 << 10, size]
        assert len(server.requests("cdn")) == 2 + 80


def test_wrong_names_are_answered_with_the_right_ones(served, mirror):
    for subset in ("sample-11BT", "CC-MAIN-1999-01", "../data", "10BT"):
        for where, paths in ((f"{REPO} at main", []), (f"the mirror {mirror[0]}", [str(mirror[0])])):
            with pytest.raises(DataError, match=rf"data\.subset: {where} has no '{subset}'; it has ") as refused:
                fineweb_edu(subset, paths=paths).units()
            names = str(refused.value).rpartition("it has ")[2].split(", ")
            assert sorted(names) == ["CC-MAIN-2024-10", "default", "sample-10BT"]
    with pytest.raises(DataError, match=r"data\.revision: .*revision v7: .*Invalid rev id"):
        fineweb_edu(revision="v7").units()
    with pytest.raises(DataError, match=r"data\.revision: "):
        fineweb_edu(revision="0" * 40).units()


def test_a_run_reads_the_state_of_its_first_contact(tmp_path, hub_settings, monkeypatch):
    old = write_mirror(tmp_path)
    with HubServer(tmp_path) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        running = fineweb_edu()
        fingerprint, commit = running.fingerprint(), running.commit
        new = write_mirror(tmp_path, seed=1)
        server.commit()
        assert texts_of(running) == texts_of(fineweb_edu(revision=commit)) == old
        assert texts_of(fineweb_edu()) == new
        assert fineweb_edu().fingerprint() != fingerprint
        assert fineweb_edu(revision=commit).fingerprint() == fingerprint


def test_offline_mode_reads_downloaded_files_without_a_request(served, tmp_path, monkeypatch):
    server, texts = served
    download(server, tmp_path / "home")
    online = fineweb_edu()
    units, commit = online.units(), online.commit
    requests = len(server.log)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    source = fineweb_edu()
    assert texts_of(source) == texts
    assert source.units() == units
    assert source.commit == commit
    with pytest.raises(DataUnavailableError, match="CC-MAIN-2024-10: offline mode is on"):
        fineweb_edu("CC-MAIN-2024-10").units()
    with pytest.raises(DataUnavailableError, match=r"lacks files of.*\"data/nonsense/\*\""):
        fineweb_edu("nonsense").units()
    assert len(server.log) == requests


def test_the_hub_and_its_cache_have_one_fingerprint(tmp_path, hub_settings, monkeypatch):
    """A run that started at the hub resumes offline, in the same data and in no other."""

    def offline():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HF_HUB_OFFLINE", "1")
            return fineweb_edu().fingerprint()

    write_mirror(tmp_path / "repository")
    with HubServer(tmp_path / "repository") as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        snapshot = Path(download(server, tmp_path / "home"))
        first = fineweb_edu().fingerprint()
        assert offline() == first
        # As huggingface_hub keeps a file that several repositories share.
        blob = (snapshot / FIRST).resolve()
        (tmp_path / "home" / "hub" / "shared").mkdir()
        blob.rename(tmp_path / "home" / "hub" / "shared" / "another-hash")
        blob.symlink_to("../../shared/another-hash")
        assert offline() == first
        changed = tmp_path / "repository" / FIRST
        changed.write_bytes(changed.read_bytes()[:-1] + b"2")  # not a byte longer
        server.commit()
        assert offline() == first, "the cache still holds what was downloaded"
        download(server, tmp_path / "home")
        assert offline() == fineweb_edu().fingerprint() != first


def test_offline_without_a_download_says_what_to_do(served, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    remedy = rf'unset HF_HUB_OFFLINE.*`hf download {REPO} --repo-type dataset --include "sample/10BT/\*"`'
    with pytest.raises(DataUnavailableError, match=remedy + ".*data.paths"):
        fineweb_edu().units()
    assert not served[0].log


def test_offline_a_download_that_was_cut_is_not_taken_for_the_whole(served, tmp_path, monkeypatch):
    from huggingface_hub import errors

    if not hasattr(errors, "IncompleteSnapshotError"):
        pytest.skip("this version of huggingface_hub does not know what a snapshot lacks")
    Path(download(served[0], tmp_path / "home"), FIRST).unlink()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataUnavailableError, match="lacks files of"):
        fineweb_edu().units()


def test_a_copy_in_another_process_reads_the_same_without_listing_again(served):
    server, texts = served
    source = fineweb_edu()
    units = source.units()
    listings = len(server.requests("hub", "/api/"))
    code = (
        "import pickle, sys; from nsa.data.sources.base import Skipped; source, unit = pickle.load(sys.stdin.buffer); "
        "sys.stdout.buffer.write(pickle.dumps((list(source.documents(unit, Skipped())), source.commit)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps((source, units[5])), stdout=subprocess.PIPE, check=True
    )
    assert pickle.loads(done.stdout) == (texts[250:300], source.commit)
    assert len(server.requests("hub", "/api/")) == listings
    assert texts_of(pickle.loads(pickle.dumps(fineweb_edu()))) == texts, "a copy made before the first contact"


def test_a_mirror_may_be_files_and_folders_with_equal_names(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    texts = [write_mirror(folder, files=1, subset="x", seed=i) for i, folder in enumerate(folders)]
    file = folders[0] / "x" / "000_00000.parquet"
    source = fineweb_edu(paths=[str(folders[0]), str(folders[1]), str(file)])
    assert {unit.path for unit in source.units()} == {"x/000_00000.parquet", "1/x/000_00000.parquet"}
    assert texts_of(source) == texts[1] + texts[0]
    assert texts_of(fineweb_edu(paths=[str(file)])) == texts[0]
    fingerprint = source.fingerprint()
    write_mirror(folders[1], files=1, rows=51, subset="x")
    assert fineweb_edu(paths=source.paths).fingerprint() != fingerprint


def test_a_mirror_without_parquet_files_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("text")
    for path in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(DataError, match=r"data\.paths: .* contains no \.parquet file"):
            fineweb_edu(paths=[str(path)]).units()
    with pytest.raises(DataError, match=r"data\.paths: no such file or folder: nowhere"):
        fineweb_edu(paths=["nowhere"]).units()
    (tmp_path / "gone.parquet").symlink_to(tmp_path / "blob")
    with pytest.raises(DataError, match=r"gone\.parquet: cannot be read: No such file"):
        fineweb_edu(paths=[str(tmp_path)]).units()


def test_another_text_field_is_other_data(tmp_path):
    write_mirror(tmp_path, files=1)
    by_text, by_url = (fineweb_edu(paths=[str(tmp_path)], text_field=field) for field in ("text", "url"))
    assert by_text.fingerprint() != by_url.fingerprint()
    for field in ("text", "url", "text"):  # in one run folder, whose index of lengths is that of the last
        config = DataConfig(source="fineweb_edu", paths=[str(tmp_path)], text_field=field)
        data = build_data(config, TrainConfig(seq_len=32), ByteTokenizer(), tmp_path / "run")
        assert data.train.batch(0, 1).inputs.shape == (1, 32)
        data.close()


def test_files_without_a_row_are_refused(tmp_path):
    (tmp_path / "sample" / "10BT").mkdir(parents=True)
    pq.ParquetWriter(tmp_path / "sample" / "10BT" / "000_00000.parquet", SCHEMA).close()
    config = DataConfig(source="fineweb_edu", paths=[str(tmp_path)])
    with pytest.raises(DataError, match=r"data\.source: fineweb_edu contains no rows"):
        build_data(config, TrainConfig(seq_len=32), ByteTokenizer())
