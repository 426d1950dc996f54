"""A run folder from somebody else: whoever reads it does not hang, and nothing is written outside it."""

import os
import shutil
import socket
from contextlib import contextmanager
from pathlib import Path

import pytest

import nsa
from nsa.checkpoint.export import find_checkpoint, load_weights, read_metadata
from nsa.checkpoint.format import BEST, INDEX_FILE, LATEST, committed, read_manifest, read_pointer, verify
from nsa.checkpoint.restore import read_state, saved_shapes
from nsa.config import load_config
from nsa.errors import CheckpointError, ConfigError, LaunchError
from nsa.files import make_folder, open_regular, read_regular, regular, replace_file, write_whole
from nsa.inspect import run_files
from nsa.inspect.reading import read_run
from nsa.inspect.run_files import HeartbeatFile
from nsa.inspect.run_report import render, write_page
from nsa.inspect.trace_report import explain
from nsa.nn.model import build_model
from nsa.run_folder import CONFIG_FILE, METRICS_FILE, TRAINING, WEIGHTS_FILE, read_events, read_json, read_rows
from nsa.train import loop, train
from nsa.train.folder import Claim, refuse_foreign
from tests.checkpoint.helpers import checkpoint_of, small

REFUSED = r"it is not a regular file|it is a symbolic link|it has more than"
pytestmark = pytest.mark.timeout(150)  # what follows a link or waits for a pipe never ends


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original") / "run"
    train(small(), folder)
    return folder


@pytest.fixture
def run(original, tmp_path) -> Path:
    return shutil.copytree(original, tmp_path / "run")


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_link_to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_link(path: Path) -> None:
    outside = path.parent.parent / f"outside-{path.name}"
    outside.write_bytes(b"{}")
    path.symlink_to(outside)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def make_huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**40)


KINDS = [make_pipe, make_link_to_device, make_link, make_socket, make_huge]


@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_of_a_bounded_size_are_opened(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    kind(Path("file"))
    with pytest.raises(OSError, match=REFUSED):
        read_regular(Path("file"))
    if kind is not make_huge:
        for mode in ("ab", "wb", "r+b"):
            with pytest.raises(OSError, match=REFUSED), open("file", mode, opener=regular):
                pass


def test_a_regular_file_is_opened_through_links_to_its_folder_and_may_be_read_only(tmp_path):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "runs").symlink_to("scratch")
    path = tmp_path / "runs" / "file"
    with open(path, "w", opener=regular) as file:
        file.write("content")
    path.chmod(0o400)
    assert read_regular(path) == b"content"
    with open_regular(path) as opened:
        assert os.get_blocking(opened.fileno())
    make_folder(tmp_path / "runs" / "inner")
    assert (tmp_path / "scratch" / "inner").is_dir()


@pytest.mark.parametrize("kind", KINDS)
def test_readers_of_a_checkpoint_refuse_irregular_files(kind, run, monkeypatch):
    checkpoint = checkpoint_of(run, 6)
    readers = {"manifest.json": (read_manifest, verify, find_checkpoint), "state.json": (read_state, verify)}
    readers[INDEX_FILE] = (saved_shapes, verify)
    for name, functions in readers.items():
        path = checkpoint / name
        path.rename(run / "aside")
        monkeypatch.chdir(checkpoint)
        kind(Path(name))
        for function in functions:
            with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
                function(checkpoint)
        path.unlink()
        (run / "aside").rename(path)
    assert verify(checkpoint)
    monkeypatch.chdir(run / "checkpoints")
    for pointer in (LATEST, BEST):
        Path(pointer).unlink()
        kind(Path(pointer))
        assert read_pointer(run / "checkpoints", pointer) is None


@pytest.mark.parametrize("kind", KINDS)
def test_readers_of_a_run_refuse_irregular_files(kind, run, monkeypatch):
    monkeypatch.chdir(run)
    names = (METRICS_FILE, CONFIG_FILE, "training.csv", "gate_stats.csv", "heartbeat_rank0.jsonl", WEIGHTS_FILE)
    for name in (*names, "trace_rank0.jsonl"):
        Path(name).unlink(missing_ok=True)
        kind(Path(name))
    problems = read_run(run).problems
    assert {name for name in problems if "cannot be read: it" in problems[name]} == set(names) - {WEIGHTS_FILE}
    with pytest.raises(OSError, match=REFUSED):
        read_json(run / METRICS_FILE)
    with pytest.raises(OSError, match=REFUSED):
        read_events(run)
    with pytest.raises(ConfigError, match="cannot be read: it"):
        load_config(run / CONFIG_FILE, in_run=True)
    with pytest.raises(CheckpointError, match="cannot be read: it"):
        list(explain(run))
    with pytest.raises(CheckpointError, match=r"metrics\.json: cannot be read"):
        train(small(), run)
    if kind is not make_huge:
        with pytest.raises(CheckpointError, match=r"model\.safetensors: "):
            nsa.load_run(run)


def test_weights_that_are_a_pipe_are_refused_and_a_link_that_the_user_names_is_followed(run, tmp_path):
    (tmp_path / "mine.safetensors").symlink_to(run / WEIGHTS_FILE)
    assert nsa.load_run(tmp_path / "mine.safetensors").model is not None
    make_pipe(tmp_path / "pipe.safetensors")
    config = small()
    model = build_model(config, 256, seed=0)
    for read in (read_metadata, lambda path: load_weights(model, path)):
        with pytest.raises(CheckpointError, match=r"pipe\.safetensors: .*it is not a regular file"):
            read(tmp_path / "pipe.safetensors")


def test_a_log_without_line_ends_is_read_in_bounded_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(run_files, "LONGEST_LINE", 1000)
    path = tmp_path / "heartbeat_rank0.jsonl"
    path.write_bytes(bytes(5500) + b"\n" + b'{"time": 1, "step": 2, "event": "end"}\n')
    file = HeartbeatFile(path)
    assert (file.damaged, file.newest["step"]) == (6, 2)


VICTIM = b"precious\n"
# Whatever a run appends to or replaces; a file per name lies outside and must not change.
LINKED = (
    *("run.log", "heartbeat_rank0.jsonl", "opt_state_mb.txt", "dtypes_report.txt", "metrics.json", "config.yaml"),
    *("env.json", "mem_boot.txt", "mem_boot.json", "mem_step1.txt", "model.safetensors", "profile_rank0.json"),
    *("profile_rank0.txt", "trace_rank0.jsonl"),
)


def linked_folder(tmp_path: Path, names: tuple[str, ...]) -> tuple[Path, dict[str, Path]]:
    folder, outside = tmp_path / "run", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    victims = {name: outside / f"victim-{name}" for name in names}
    for name, victim in victims.items():
        victim.write_bytes(VICTIM)
        (folder / name).symlink_to(victim)
    return folder, victims


def test_no_write_of_a_run_leaves_its_folder(tmp_path):
    folder, victims = linked_folder(tmp_path, LINKED)
    (tmp_path / "link").symlink_to(folder)  # the folder itself may be a link
    train(small("train.profile_steps=[1,2]", "telemetry.trace_grads=true"), tmp_path / "link", fresh=True)
    assert {name for name, victim in victims.items() if victim.read_bytes() != VICTIM} == set()
    metrics = read_json(folder / METRICS_FILE)
    assert metrics["status"] == "done"
    assert metrics["telemetry_failures"] > 0, "what could not be written is counted"


@pytest.mark.parametrize("name", [".lock", "training.csv", "gate_stats.csv"])
def test_a_linked_file_that_a_run_needs_ends_it_with_a_launch_error(name, tmp_path):
    folder, victims = linked_folder(tmp_path, (name,))
    (folder / "heartbeat_rank0.jsonl").touch()  # a run was here
    with pytest.raises(LaunchError, match=r"it is a symbolic link"):
        train(small(), folder)
    assert victims[name].read_bytes() == VICTIM


@pytest.mark.parametrize("name", ["checkpoints", "tb", "nonfinite", "wandb", ".wandb", "data_index_1"])
def test_a_linked_folder_inside_a_run_is_refused(name, tmp_path):
    folder, outside = tmp_path / "run", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (folder / name).symlink_to(outside)
    with pytest.raises(LaunchError, match=rf"train\.out_dir: .*{name} is a symbolic link"):
        train(small(), folder)
    with pytest.raises(OSError, match="symbolic link"):
        make_folder(folder / name)
    assert not list(outside.iterdir())


def test_a_tokenizer_of_any_size_is_not_read(run):
    config = run / CONFIG_FILE
    config.write_text(config.read_text().replace("tokenizer: bytes", "tokenizer: own.json"))
    make_huge(run / "tokenizer.json")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: it has more than"):
        nsa.load_run(run)


def test_a_lock_file_is_not_truncated_before_it_is_locked(tmp_path):
    (tmp_path / ".lock").write_bytes(VICTIM)
    with Claim(tmp_path).hold(), pytest.raises(LaunchError, match="another run"), Claim(tmp_path).hold():
        pass
    assert (tmp_path / ".lock").read_bytes() == VICTIM


def test_a_report_is_not_written_through_a_link(run, tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(VICTIM)
    for name in ("report.html", "report.html.tmp"):
        (run / name).symlink_to(victim)
    write_page(render(read_run(run)), run / "report.html")
    assert victim.read_bytes() == VICTIM
    assert not (run / "report.html").is_symlink()


def test_partial_files_of_a_killed_process_are_removed(tmp_path):
    kept = {"kept.txt", ".hidden", ".notes.1", "model.safetensors", ".metrics.json.orig"}
    random, of_version_0_1 = f".metrics.json.{'0a' * 8}", (".model.safetensors.123", ".metrics.json.77")
    for name in (random, *of_version_0_1, *kept):
        (tmp_path / name).write_bytes(VICTIM)
    with Claim(tmp_path).hold():
        assert {path.name for path in tmp_path.iterdir()} == {".lock", *kept}


IMPORTED = ("config.yaml", "model.safetensors", "tokenizer.json")
# Folders of others, and a file or folder that the message must name.
FOREIGN = {
    "imported": (IMPORTED, "model.safetensors"),
    "hugging face": (("config.json", "model.safetensors", "tokenizer.json"), "model.safetensors"),
    "hugging face, shards": (("config.json", "model-00001-of-00002.safetensors"), "config.json"),
    "checkpoints": (("checkpoints/step_1000/model.pt",), "checkpoints"),
    "checkpoints named as ours": (("checkpoints/step_00001000/weights.bin",), "checkpoints"),
    "metrics": (("metrics.json", "notes.txt"), "metrics.json"),
    "table": (("training.csv",), "training.csv"),
    "removed by --fresh": (("mem_notes.txt",), "mem_notes.txt"),
}


def fill_folder(folder: Path, names: tuple[str, ...]) -> None:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(VICTIM)


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("kind", FOREIGN)
def test_a_folder_that_no_run_wrote_is_refused_and_stays_as_it_is(kind, fresh, tmp_path):
    names, named = FOREIGN[kind]
    fill_folder(tmp_path, names)
    before = sorted(tmp_path.rglob("*"))
    for _ in range(2):  # the first refusal leaves nothing that lets the second start pass
        with pytest.raises(LaunchError, match=rf"train\.out_dir: .*{named}") as refused:
            train(small(), tmp_path, fresh=fresh)
        assert ("did you mean train.init_from?" in str(refused.value)) == (kind == "imported")
    assert sorted(tmp_path.rglob("*")) == before
    assert all((tmp_path / name).read_bytes() == VICTIM for name in names)


@contextmanager
def without_permission(folder: Path):
    """Inside, this process may not look into the folder. Permissions do not bind root, who becomes another user."""
    folder.chmod(0)
    user = os.geteuid()
    os.seteuid(user or 65534)
    try:
        yield
    finally:
        os.seteuid(user)
        folder.chmod(0o755)


def test_a_path_that_cannot_be_looked_up_is_refused_with_its_name(tmp_path):
    with pytest.raises(LaunchError, match=r"train\.out_dir: .*xxx' cannot be used: File name too long; choose another"):
        train(small(), tmp_path / ("x" * 300))
    with without_permission(tmp_path):
        with pytest.raises(LaunchError, match=r"train\.out_dir: .*run' cannot be used: Permission denied"):
            refuse_foreign(tmp_path / "run", fresh=False)
        with pytest.raises(CheckpointError, match="checkpoints: cannot be read: Permission denied"):
            committed(tmp_path / "checkpoints")


# What a run leaves that was killed early, what a copy without hidden files has, and what may lie there before a run.
OWN = {
    "missing": None,
    "empty": (),
    "killed at the start": (".lock",),
    "killed early": (".lock", "run.log", "heartbeat_rank0.jsonl", "data_index_1/a.docs", "training.csv"),
    "first version": (".lock", "training.csv", "config.yaml", "metrics.json", "model.safetensors"),
    "copied without hidden files": ("heartbeat_rank0.jsonl", "config.yaml", "metrics.json", "checkpoints/latest"),
    "checkpoints alone": ("checkpoints/step_00000006/manifest.json", "checkpoints/latest"),
    "log of a launcher": ("run.log", "slurm-17.out", "nohup.out", "none_abc/attempt_0/0/stdout.log", "README.md"),
    "index of data": ("data_index_1/a.docs", "tb/events", "wandb/latest-run/logs"),
}


@pytest.mark.parametrize("kind", OWN)
def test_a_run_folder_or_one_without_files_at_risk_is_accepted(kind, tmp_path):
    if (names := OWN[kind]) is not None:
        fill_folder(tmp_path / "run", names)
    for fresh in (False, True):
        refuse_foreign(tmp_path / "run", fresh=fresh)


@pytest.mark.parametrize("source", [".", "model.safetensors", "checkpoints/latest"])
@pytest.mark.parametrize("name", ["init_from", "teacher"])
def test_a_run_does_not_start_from_weights_that_it_would_replace(name, source, run):
    before = everything_in(run / "checkpoints")
    with pytest.raises(ConfigError, match=rf"train\.{name}: .* belongs to train\.out_dir"):
        train(small(f"train.{name}={run / source}"), run, fresh=True)
    assert everything_in(run / "checkpoints") == before
    assert nsa.load_run(run).weights == run / WEIGHTS_FILE
    train(small(), run)  # it is still finished


def test_fresh_never_deletes_foreign_files_next_to_checkpoints(run):
    fill_folder(run / "checkpoints", ("mine/precious",))
    with pytest.raises(LaunchError, match=r"train\.out_dir: .*checkpoints holds mine"):
        train(small(), run, fresh=True)
    assert (run / "checkpoints" / "mine" / "precious").read_bytes() == VICTIM
    assert nsa.load_run(run, checkpoint="latest").model is not None
    train(small(), run)  # without --fresh nothing is deleted


def everything_in(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def deleted(folder: Path, other: Path) -> None:
    shutil.rmtree(folder)


def renamed(folder: Path, other: Path) -> None:
    folder.rename(folder.with_name("moved"))


def replaced(folder: Path, other: Path) -> None:
    renamed(folder, other)
    shutil.copytree(other, folder)


def linked(folder: Path, other: Path) -> None:
    renamed(folder, other)
    folder.symlink_to(shutil.copytree(other, folder.with_name("other")))


def test_a_run_whose_folder_is_moved_away_writes_no_profile_at_its_path(original, tmp_path, monkeypatch):
    folder, step = tmp_path / "run", loop.train_step

    def train_step(state, *args, **kwargs):
        if state.progress.step == 3:
            replaced(folder, original)
        return step(state, *args, **kwargs)

    monkeypatch.setattr(loop, "train_step", train_step)
    with pytest.raises(LaunchError, match="was renamed, deleted or replaced"):
        train(small("checkpoint.every=1", "train.eval_every=0", "train.profile_steps=[2, 90]"), folder)
    assert not list(folder.glob("profile_*"))


# With a checkpoint after the step, after the next one, and at the end only; or a memory dump after the step.
@pytest.mark.parametrize(
    ("what", "every", "dumps"), [(deleted, 1, 0), (renamed, 2, 0), (replaced, 0, 0), (linked, 1, 0), (replaced, 0, 1)]
)
def test_a_run_whose_folder_is_moved_away_ends_and_writes_nothing_at_its_path(
    what, every, dumps, original, tmp_path, monkeypatch
):
    folder, moved, at_path, step = tmp_path / "run", tmp_path / "moved", [], loop.train_step

    def train_step(state, *args, **kwargs):
        if state.progress.step == 3:
            what(folder, original)
            at_path.append(everything_in(folder))
        return step(state, *args, **kwargs)

    monkeypatch.setattr(loop, "train_step", train_step)
    config = small(f"checkpoint.every={every}", "train.eval_every=0", f"telemetry.mem_dump_every={dumps}")
    with pytest.raises(LaunchError, match=r"train\.out_dir: .*run was renamed, deleted or replaced") as ended:
        train(config, folder)
    assert ended.value.exit_code == 7
    assert at_path == [everything_in(folder)]
    assert folder.exists() == (what in (replaced, linked))
    if what is not deleted:
        assert "ended by LaunchError: train.out_dir" in (moved / "run.log").read_text()
        monkeypatch.undo()
        train(config, moved)
        assert [int(row["step"]) for row in read_rows(moved, TRAINING)] == [1, 2, 3, 4, 5, 6]


def test_a_run_whose_folder_is_gone_after_its_last_save_has_not_succeeded(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "gather_weights", lambda *_: renamed(tmp_path / "run", tmp_path))
    with pytest.raises(LaunchError, match="was renamed, deleted or replaced"):
        train(small(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_storage_that_does_not_answer_for_a_moment_does_not_end_a_run(tmp_path, monkeypatch):
    claim = Claim(tmp_path / "run")
    with claim.hold():
        monkeypatch.setattr(Path, "lstat", lambda _: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        assert not claim.is_lost()
        monkeypatch.undo()
        assert not claim.is_lost()
        renamed(tmp_path / "run", tmp_path)
        assert claim.is_lost()


def write_text(path: Path, content: bytes) -> None:
    write_whole(path, content.decode())


@pytest.mark.parametrize("write", [replace_file, write_text])
def test_processes_with_one_id_do_not_write_into_each_others_files(write, tmp_path, monkeypatch):
    """Two containers on a shared volume: the second writes the same file while the first has not renamed its own."""
    path, rename = tmp_path / "metrics.json", Path.replace

    def interrupted(aside: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", rename)
        write(path, b"second")
        assert path.read_bytes() == b"second"
        return rename(aside, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    write(path, b"first")
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("write", [replace_file, write_text])
def test_a_temporary_file_that_exists_is_neither_written_nor_removed(write, tmp_path, monkeypatch):
    path, aside = tmp_path / "metrics.json", tmp_path / ".metrics.json.0123456789abcdef"
    aside.write_bytes(VICTIM)
    monkeypatch.setattr("secrets.token_hex", lambda _: "0123456789abcdef")
    with pytest.raises(FileExistsError):
        write(path, b"new")
    assert aside.read_bytes() == VICTIM
    assert list(tmp_path.iterdir()) == [aside]


def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "report.html"
    write_whole(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "not UTF-8: \udc80")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
