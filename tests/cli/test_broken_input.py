"""For every mistake of a user, the command names the field and what to do, sets its exit code and trains nothing."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from nsa import __version__
from nsa.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
CONFIG, DATA, CHECKPOINT = 2, 3, 4  # exit codes

BASE = """\
model: {dim: 32, n_layers: 1, n_heads: 2, n_kv_heads: 1, head_dim_k: 16, head_dim_v: 16}
nsa: {cmp_block: 8, cmp_stride: 4, sel_block: 8, num_selected: 4, window: 16}
data: {source: synthetic}
train: {steps: 1, seq_len: 64, batch_size: 2, out_dir: OUT_DIR}
runtime: {device: cpu, threads: 1}
"""
SENTENCES = [f"Document {i} says something of its own, number {i * i}." for i in range(40)]


@dataclass(frozen=True)
class Case:
    """`field` and `hint` must be in the message. In overrides, TMP stands for the folder that holds `files`."""

    id: str
    exit_code: int
    field: str
    hint: str
    overrides: tuple[str, ...] = ()
    yaml: str | bytes | None = None  # instead of BASE
    config_name: str = "run.yaml"
    files: dict[str, str | bytes] = field(default_factory=dict)


def override(name: str, text: str, field: str, hint: str) -> Case:
    """A mistake in one field. The colon distinguishes the name of the field from the echo of the override."""
    return Case(name, CONFIG, f" {field}: ", hint, (text,))


def malformed(name: str, *arguments: str, culprit: str, hint: str) -> Case:
    return Case(name, CONFIG, culprit, hint, arguments)


def config_file(name: str, text: str | bytes, field: str, hint: str) -> Case:
    return Case(name, CONFIG, field, hint, yaml=text)


def text_data(name: str, files: dict[str, str | bytes], paths: str, field: str, hint: str, *more: str) -> Case:
    return Case(name, DATA, field, hint, ("data.source=text", f"data.paths=[{paths}]", *more), files=files)


UNKNOWN_NAMES = [
    override("key-misspelt", "train.step=3", "train.step", "did you mean 'train.steps'?"),
    override("key-of-another-section", "model.lr=3e-4", "model.lr", "did you mean 'train.lr'?"),
    override("key-without-section", "seed=3", "seed", "did you mean 'train.seed'?"),
    override("key-like-no-other", "checkpoint.zzz=3", "checkpoint.zzz", "valid here: every, keep"),
    override("key-in-a-nested-section", "parallel.ddp.bucket=3", "parallel.ddp.bucket", "'parallel.ddp.bucket_mb'"),
    override("section-misspelt", "modle.dim=32", "modle", "did you mean 'model'?"),
    config_file("section-misspelt-in-file", "trian: {steps: 1}\n", "run.yaml: trian", "did you mean 'train'?"),
    config_file("key-is-a-number", "model: {1: 2}\n", "model.1", "keys must be strings"),
]

WRONG_TYPES = [
    override("text-for-integer", "train.steps=ten", "train.steps", "must be a valid integer, got 'ten'"),
    override("quoted-integer", "train.steps='10'", "train.steps", "must be a valid integer, got '10'"),
    override("bool-for-integer", "model.n_layers=true", "model.n_layers", "must be a valid integer, got True"),
    override("fraction-for-integer", "train.batch_size=1.5", "train.batch_size", "must be a valid integer, got 1.5"),
    override("list-for-scalar", "train.lr=[1e-3]", "train.lr", "must be a valid number"),
    override("mapping-for-scalar", "train.lr={a: 1}", "train.lr", "must be a valid number"),
    override("scalar-for-list", "data.paths=notes.txt", "data.paths", "must be a valid list"),
    override("integer-for-path", "data.paths=[3]", "data.paths.0", "must be a valid string"),
    override("integer-for-bool", "runtime.compile=1", "runtime.compile", "must be a valid boolean"),
    override("nothing-for-integer", "train.steps=", "train.steps", "remove the key to use its default"),
    override("null-for-number", "train.lr=null", "train.lr", "remove the key to use its default"),
    override("scalar-for-section", "train=5", "train", "must be a section, got 5"),
    config_file("missing-space-after-colon", "model:\n  dim:32\n", "model", "must be a section, got 'dim:32'"),
]

WRONG_VALUES = [
    override("dim-zero", "model.dim=0", "model.dim", "greater than or equal to 1"),
    override("layers-negative", "model.n_layers=-1", "model.n_layers", "greater than or equal to 1"),
    override("one-token-sequences", "train.seq_len=1", "train.seq_len", "greater than or equal to 2"),
    override("batch-zero", "train.batch_size=0", "train.batch_size", "greater than or equal to 1"),
    override("head-size-20", "model.head_dim_k=20", "model.head_dim_k", "must be a multiple of 16"),
    override("head-size-512", "model.head_dim_v=512", "model.head_dim_v", "less than or equal to 256"),
    override("window-zero", "nsa.window=0", "nsa.window", "must be at least 1"),
    override("num-init-negative", "nsa.num_init=-1", "nsa.num_init", "must be at least 0"),
    override("lr-zero", "train.lr=0", "train.lr", "must be greater than 0"),
    override("lr-negative", "train.lr=-3e-4", "train.lr", "must be greater than 0"),
    override("lr-nan", "train.lr=.nan", "train.lr", "must be a finite number"),
    override("lr-infinite", "train.lr=.inf", "train.lr", "must be a finite number"),
    override("fraction-above-one", "data.validation_fraction=1.5", "data.validation_fraction", "must be less than 1"),
    override("seed-beyond-64-bits", "train.seed=18446744073709551616", "train.seed", "must be less than 9223372"),
    override("keep-too-few-checkpoints", "checkpoint.keep=1", "checkpoint.keep", "greater than or equal to 2"),
    override("empty-out-dir", "train.out_dir=''", "train.out_dir", "at least 1 character"),
    override("empty-path", "data.paths=['']", "data.paths.0", "at least 1 character"),
    override("schedule-misspelt", "train.schedule=cosin", "train.schedule", "must be 'cosine', 'wsd' or 'constant'"),
    override("unknown-device", "runtime.device=tpu", "runtime.device", "must be 'auto', 'cpu' or 'cuda'"),
    override("unknown-precision", "runtime.precision=int8", "runtime.precision", "'fp32', 'bf16' or 'fp16'"),
    override("unknown-branch", "nsa.force_branch=all", "nsa.force_branch", "must be 'cmp', 'sel' or 'win'"),
    override("unknown-source", "data.source=web", "data.source", "'megatron', 'datatrove' or 'chat'"),
    override("unknown-micro-batch", "train.micro_batch=all", "train.micro_batch", "must be 'auto'"),
]

BROKEN_RULES = [
    override("stride-not-in-cmp-block", "nsa.cmp_stride=3", "nsa.cmp_stride", "must divide cmp_block"),
    override("stride-not-in-sel-block", "nsa.sel_block=10", "nsa.cmp_stride", "must divide sel_block"),
    override("cmp-block-above-sel-block", "nsa.cmp_block=16", "nsa.cmp_block", "must not exceed sel_block"),
    override("fewer-selected-than-forced", "nsa.num_selected=2", "nsa.num_selected", "num_init + num_local = 3"),
    override("kv-heads-not-dividing", "model.n_kv_heads=3", "model.n_kv_heads", "must divide n_heads"),
    override("micro-batch-not-dividing", "train.micro_batch=3", "train.micro_batch", "must divide batch_size"),
    override("profile-backwards", "train.profile_steps=[3, 1]", "train.profile_steps", "must not come after the last"),
    override("text-without-paths", "data.source=text", "data.paths", "for example data.paths=[notes.txt]"),
    override("prepared-without-paths", "data.source=prepared", "data.paths", "needs a folder that `nsa data prepare`"),
    override("hub-without-repository", "data.source=hub", "data.repo", "for example data.repo=wikimedia/wikipedia"),
    override("mixture-without-weights", "data.mixture=[{source: python, weight: 0}]", "weight", "greater than 0"),
    override("separator-of-bytes", "data.separator=x", "data.separator", "leave it unset"),
    override("vocabulary-of-another-tokenizer", "model.vocab_size=100", "model.vocab_size", "leave it unset"),
    override("unknown-tokenizer", "data.tokenizer=no-such", "data.tokenizer", "use 'bytes'"),
]

BROKEN_FILES = [
    Case("file-missing", CONFIG, "rum.yaml", "did you mean", config_name="rum.yaml"),
    Case("file-missing-like-no-other", CONFIG, "zzz.yml", "give the path of a YAML file", config_name="zzz.yml"),
    Case("file-is-a-folder", CONFIG, "a_folder", "give the path of a YAML file", config_name="a_folder"),
    Case("name-not-utf8", CONFIG, "is not valid UTF-8", "rename the file", config_name="\udcff", files={"\udcff": ""}),
    config_file("bracket-open", "model: {dim: 32\n", "run.yaml, line", "check indentation, colons and brackets"),
    config_file("indent-wrong", "model:\n  dim: 32\n n_heads: 2\n", "run.yaml, line 3", "check indentation"),
    config_file("tab", "model:\n\tdim: 32\n", "run.yaml, line 2", "indent with spaces, not tabs"),
    config_file("binary", b"\x89PNG\r\n\x1a\n\xff\xfe", "run.yaml: byte 0", "save the file as UTF-8 text"),
    config_file("null-byte", b"model:\x00\n", "run.yaml", "special characters are not allowed"),
    config_file("list-at-top", "- model\n- train\n", "run.yaml", "must hold sections such as 'model:'"),
    config_file("text-at-top", "train please\n", "run.yaml", "must hold sections such as 'model:'"),
    config_file("key-twice", "train:\n  steps: 1\n  steps: 2\n", "'steps' is given twice", "keep one of them"),
    config_file("two-documents", "train: {}\n---\ntrain: {}\n", "run.yaml, line 2", "found another document"),
    config_file("tag", "train: !!python/object/apply:os.getcwd []\n", "run.yaml, line 1", "write the plain value"),
]

BROKEN_OVERRIDES = [
    malformed("no-equals-sign", "train.steps", culprit="override 'train.steps'", hint="write it as section.key=value"),
    malformed("no-key", "=10", culprit="override '=10'", hint="write it as section.key=value"),
    malformed(
        "empty-part", "train..steps=1", culprit="override 'train..steps=1'", hint="write it as section.key=value"
    ),
    malformed("into-a-scalar", "train.steps.x=3", culprit="'train.steps' is not a section", hint="train.steps=VALUE"),
    malformed("open-bracket", "data.paths=[a", culprit="override 'data.paths=[a'", hint="colons and brackets"),
    malformed("open-quote", "--override", "train.out_dir='a", culprit="--override: ", hint="write key=value pairs"),
    malformed("in-one-string", "--override", "train.seed=1 train.steps=0", culprit=" train.steps: ", hint="equal to 1"),
]

BROKEN_DATA = [
    text_data("file-missing", {}, "TMP/no.txt", "data.paths: no such file or folder", "relative paths start at"),
    text_data("folder-without-text", {"d/a.csv": "a"}, "TMP/d", "data.paths", "contains no .txt or .jsonl file"),
    text_data("glob-without-match", {}, "'TMP/*.txt'", "data.paths", "check the pattern"),
    text_data("wrong-suffix", {"a.doc": "a"}, "TMP/a.doc", "data.paths", "convert it or rename it"),
    text_data("invalid-utf8", {"a.txt": b"abc\xff"}, "TMP/a.txt", "a.txt: byte 3", "remove it from data.paths"),
    text_data("jsonl-invalid-utf8", {"a.jsonl": b'{"text": "\xff"}'}, "TMP/a.jsonl", "a.jsonl: byte 10", "data.paths"),
    text_data("jsonl-broken", {"a.jsonl": '{"text": "a"}\n{"te'}, "TMP/a.jsonl", "a.jsonl, line 2", "fix the line or"),
    text_data("jsonl-endless-number", {"a.jsonl": "1" * 5000}, "TMP/a.jsonl", "a.jsonl, line 1", "fix the line or"),
    text_data("jsonl-too-deep", {"a.jsonl": "[" * 100_000}, "TMP/a.jsonl", "a.jsonl, line 1", "fix the line or"),
    text_data(
        "jsonl-other-field",
        {"a.jsonl": '{"body": "a", "id": 3}'},
        "TMP/a.jsonl",
        "line 1: no field 'text'; it has body, id",
        "text_field",
    ),
    text_data("jsonl-no-object", {"a.jsonl": '["text"]'}, "TMP/a.jsonl", "line 1: no field 'text'", "not an object"),
    text_data("jsonl-field-no-text", {"a.jsonl": '{"text": 5}'}, "TMP/a.jsonl", "must be a text", "data.text_field"),
    text_data("corpus-empty", {"a.txt": " \n", "b.txt": ""}, "TMP/a.txt, TMP/b.txt", "corpus is empty", "data.paths"),
    text_data(
        "one-document-to-split",
        {"a.txt": "word " * 100},
        "TMP/a.txt",
        "data.validation_fraction",
        "set data.validation_fraction=0",
    ),
    text_data(
        "sequence-beyond-corpus",
        {"a.txt": "short"},
        "TMP/a.txt",
        "train.seq_len: a sequence needs 65 tokens and the training documents have 6",
        "a smaller train.seq_len",
        "data.validation_fraction=0",
    ),
    text_data(
        "sequence-beyond-validation",
        {f"d/{i}.txt": sentence for i, sentence in enumerate(SENTENCES)},
        "TMP/d",
        "train.seq_len: a sequence needs 65 tokens and the validation documents have",
        "a larger data.validation_fraction",
        "data.validation_fraction=0.001",
    ),
]

MISTYPED = [
    (["train"], "CONFIG"),
    (["trian"], "trian"),
    (["train", "run.yaml", "--setps", "3"], "--setps"),
    (["generate", "run", "--max-tokens", "many"], "--max-tokens"),
    (["generate", "run", "--temperature", "-1"], "--temperature"),
    (["generate", "run", "--seed", str(2**64)], "--seed"),
    (["generate", "run", "--top-p", "0"], "--top-p"),
    (["generate", "run", "--top-p", "1.5"], "--top-p"),
    (["generate", "run", "--top-p", "nan"], "--top-p"),
]

BROKEN_CONFIGURATION = (
    *UNKNOWN_NAMES,
    *WRONG_TYPES,
    *WRONG_VALUES,
    *BROKEN_RULES,
    *BROKEN_FILES,
    *BROKEN_OVERRIDES,
)


def write_files(folder: Path, case: Case) -> list[str]:
    """Everything the case needs, and the arguments of its command."""
    base = BASE.replace("OUT_DIR", str(folder / "out"))
    text = base if case.yaml is None else case.yaml
    (folder / "a_folder").mkdir()
    for name, content in {"run.yaml": text, **case.files}.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    overrides = [part.replace("TMP", str(folder)) for part in case.overrides]
    return ["train", str(folder / case.config_name), *overrides]


def run_here(arguments: list[str], monkeypatch, capsys) -> tuple[int, str]:
    """The command inside this process: its exit code, and what it wrote to stderr."""
    monkeypatch.setattr(sys, "argv", ["nsa", *arguments])
    monkeypatch.setattr("nsa.cli.main._waiting_threads", set)  # threads of other tests may still wait
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, capsys.readouterr().err


def run_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nsa", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def assert_explained(case: Case, exit_code: int, stderr: str, folder: Path) -> None:
    assert exit_code == case.exit_code, stderr
    assert case.field in stderr
    assert case.hint in stderr
    assert all(line.startswith("error: ") for line in stderr.splitlines()), stderr
    assert "Traceback" not in stderr
    assert not list(folder.rglob("training.csv"))


def test_at_least_45_mistakes_are_tried_and_each_has_a_unique_name():
    names = [(case.exit_code, case.id) for case in (*BROKEN_CONFIGURATION, *BROKEN_DATA)]
    assert len(names) >= 45
    assert len(set(names)) == len(names)


def test_the_unbroken_configuration_trains(tmp_path, monkeypatch, capsys):
    """So every case below fails for its own reason."""
    arguments = write_files(tmp_path, Case("unbroken", 0, "", ""))
    exit_code, stderr = run_here(arguments, monkeypatch, capsys)
    assert exit_code == 0, stderr
    assert (tmp_path / "out" / "training.csv").is_file()


@pytest.mark.parametrize("case", BROKEN_CONFIGURATION, ids=lambda case: case.id)
def test_a_configuration_mistake_is_explained_and_nothing_is_trained(case, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exit_code, stderr = run_here(write_files(tmp_path, case), monkeypatch, capsys)
    assert_explained(case, exit_code, stderr, tmp_path)


@pytest.mark.parametrize("case", BROKEN_DATA, ids=lambda case: case.id)
def test_a_data_mistake_is_explained_and_nothing_is_trained(case, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exit_code, stderr = run_here(write_files(tmp_path, case), monkeypatch, capsys)
    assert_explained(case, exit_code, stderr, tmp_path)


def test_a_process_of_its_own_ends_with_the_same_message_and_code(tmp_path):
    case = WRONG_TYPES[0]
    done = run_process(*write_files(tmp_path, case))
    assert_explained(case, done.returncode, done.stderr, tmp_path)
    assert "Traceback" not in done.stdout


def test_the_version_is_printed_by_a_process_of_its_own():
    done = run_process("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"nsa {__version__}\n", "")


def test_checking_files_lists_the_mistakes_of_all_of_them(tmp_path, monkeypatch, capsys):
    (tmp_path / "one.yaml").write_text("train: {steps: 0}\n")
    (tmp_path / "two.yaml").write_text("model: {dims: 32}\n")
    exit_code, stderr = run_here(["config", "check", *map(str, tmp_path.glob("*.yaml"))], monkeypatch, capsys)
    assert exit_code == CONFIG
    assert "one.yaml: train.steps: must be greater" in stderr
    assert "two.yaml: model.dims: unknown key; did you mean 'model.dim'?" in stderr


def test_checking_a_file_warns_about_valid_settings_that_are_probably_mistakes(tmp_path, monkeypatch, capsys):
    (tmp_path / "short.yaml").write_text("train: {steps: 5, warmup_steps: 100}\n")
    (tmp_path / "mine.yaml").write_text("data: {tokenizer: gone/tokenizer.json}\n")
    (tmp_path / "fine.yaml").write_text("train: {steps: 5, warmup_steps: 5}\n")
    monkeypatch.setenv("NSA_USE_FA3", "0")
    exit_code, stderr = run_here(["config", "check", *map(str, sorted(tmp_path.glob("*.yaml")))], monkeypatch, capsys)
    assert exit_code == 0, stderr
    assert sorted(stderr.splitlines()) == [
        f"warning: {tmp_path / 'mine.yaml'}: data.tokenizer: there is no file gone/tokenizer.json",
        f"warning: {tmp_path / 'short.yaml'}: train.warmup_steps: 100 is more than the 5 of train.steps: the learning "
        "rate never reaches train.lr=0.0002; lower it, unless this run tests the start of a longer one",
        "warning: NSA_USE_FA3: unknown variable; did you mean NSA_USE_FA2?",
    ]


@pytest.mark.parametrize("command", [["data", "stats", "--limit", "1"], ["train", "quickstart"]])
def test_paths_that_no_source_reads_are_reported(monkeypatch, capsys, command):
    monkeypatch.setattr("nsa.train.train", lambda *run, **options: None)
    said = "data.paths: is not used, since data.source is python; set data.source=text or another that reads files"
    exit_code, stderr = run_here([*command, "data.paths=[books]"], monkeypatch, capsys)
    assert exit_code == 0
    assert said in stderr


def test_files_and_folders_in_each_others_place_are_answered_with_what_to_give(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.yaml").write_text("train: {steps: 1}\n")
    exit_code, stderr = run_here(["train", str(tmp_path)], monkeypatch, capsys)
    assert exit_code == CONFIG
    assert f"{tmp_path}: cannot be read: Is a directory; did you mean {tmp_path / 'config.yaml'}?" in stderr
    exit_code, stderr = run_here(["data", "stats", str(tmp_path / "config.yaml")], monkeypatch, capsys)
    assert exit_code == DATA
    assert "config.yaml is a file; give a folder that `nsa data prepare` wrote" in stderr


def test_checking_a_file_finds_a_misspelt_tokenizer(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.yaml").write_text("data: {tokenizer: gtp2}\n")
    (tmp_path / "b.yaml").write_text("data: {tokenizer: gpt2}\n")
    exit_code, stderr = run_here(["config", "check", *map(str, sorted(tmp_path.glob("*.yaml")))], monkeypatch, capsys)
    assert exit_code == CONFIG
    assert stderr.startswith(f"error: {tmp_path / 'a.yaml'}: data.tokenizer: 'gtp2' is neither a tokenizer nor a file")
    assert "b.yaml" not in stderr


def test_training_warns_of_a_warm_up_that_never_ends_and_a_profile_that_never_starts(tmp_path, monkeypatch, capsys):
    (tmp_path / "run.yaml").write_text(BASE.replace("OUT_DIR", str(tmp_path / "out")))
    monkeypatch.setattr("nsa.train.train", lambda *run, **options: None)
    overrides = ["train.warmup_steps=9", "train.profile_steps=[2, 3]"]
    exit_code, stderr = run_here(["train", str(tmp_path / "run.yaml"), *overrides], monkeypatch, capsys)
    assert exit_code == 0
    assert "run.yaml: train.warmup_steps: 9 is more than the" in stderr
    assert "run.yaml: train.profile_steps: begins after the 1 of train.steps" in stderr


@pytest.mark.parametrize(
    ("name", "overrides", "folder"),
    [
        ("run", ["train.out_dir=~/runs/x"], "HOME/runs/x"),
        ("run", ["train.out_dir=~nobody_here/x"], "~nobody_here/x"),
        ("run #1", [], "runs/run #1"),
        ("a: b", [], "runs/a: b"),
        ("new\nline", [], "runs/new\nline"),
        ("17", [], "runs/17"),
    ],
)
def test_a_run_gets_the_folder_that_was_named(name, overrides, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folders = []
    monkeypatch.setattr("nsa.train.train", lambda config, folder, **options: folders.append(folder))
    Path(f"{name}.yaml").write_text(BASE.replace(", out_dir: OUT_DIR", ""))
    exit_code, stderr = run_here(["train", f"{name}.yaml", *overrides], monkeypatch, capsys)
    assert (exit_code, stderr, folders) == (0, "", [Path(folder.replace("HOME", str(tmp_path / "home")))])


def test_a_run_has_the_configuration_that_a_pipe_holds(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    reader, writer = os.pipe()
    os.write(writer, BASE.replace(", out_dir: OUT_DIR", "").encode())
    os.close(writer)
    runs = []
    monkeypatch.setattr("nsa.train.train", lambda config, folder, **options: runs.append((config, folder)))
    exit_code, stderr = run_here(["train", f"/dev/fd/{reader}"], monkeypatch, capsys)
    os.close(reader)
    assert (exit_code, stderr) == (0, "")
    [(config, folder)] = runs
    assert (config.model.dim, config.train.out_dir, folder) == (32, f"runs/{reader}", Path(f"runs/{reader}"))


@pytest.mark.parametrize(("arguments", "culprit"), MISTYPED, ids=[" ".join(words) for words, _ in MISTYPED])
def test_a_mistyped_command_line_names_the_argument(arguments, culprit, monkeypatch, capsys):
    exit_code, stderr = run_here(arguments, monkeypatch, capsys)
    assert exit_code == CONFIG
    assert culprit in stderr
    assert "Traceback" not in stderr


# Missing or damaged weights: exit code 4.


@pytest.fixture
def run_folder(tmp_path):
    """A run folder whose weights are still missing."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(BASE.replace("OUT_DIR", str(tmp_path / "out")))
    return folder


def assert_refused(arguments: list[str], name: str, hint: str, monkeypatch, capsys) -> None:
    exit_code, stderr = run_here(arguments, monkeypatch, capsys)
    assert exit_code == CHECKPOINT, stderr
    assert stderr.startswith("error: ")
    assert name in stderr
    assert hint in stderr
    assert "Traceback" not in stderr


def test_training_from_weights_that_are_missing_is_refused(run_folder, tmp_path, monkeypatch, capsys):
    arguments = ["train", str(run_folder / "config.yaml"), f"train.init_from={tmp_path / 'gone.safetensors'}"]
    assert_refused(arguments, "gone.safetensors", "No such file", monkeypatch, capsys)
    assert not list(tmp_path.rglob("training.csv"))


def test_training_from_weights_of_another_model_is_refused(run_folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "other.safetensors").write_bytes(save({"weight": torch.zeros(9)}))
    arguments = ["train", str(run_folder / "config.yaml"), f"train.init_from={tmp_path / 'other.safetensors'}"]
    assert_refused(
        arguments, "other.safetensors", "the model needs the configuration and the tokenizer", monkeypatch, capsys
    )
    assert not list(tmp_path.rglob("training.csv"))


def test_generating_from_a_folder_that_is_not_a_run_is_refused(tmp_path, monkeypatch, capsys):
    assert_refused(["generate", str(tmp_path)], "no config.yaml", "give the out_dir", monkeypatch, capsys)


TAKES_A_RUN = (
    *("generate RUN", "eval RUN", "report RUN", "watch RUN --once", "trace RUN", "ckpt list RUN", "ckpt verify RUN"),
    *("ckpt export RUN out", "export RUN out", "export RUN out --format safetensors"),
    *("train CONFIG train.init_from=RUN", "train CONFIG train.teacher=RUN"),
)


@pytest.mark.parametrize("command", TAKES_A_RUN)
def test_every_command_reports_a_missing_run_alike(command, run_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = command.replace("CONFIG", str(run_folder / "config.yaml")).replace("RUN", "runs/gone")
    key = f"{given.split()[-1].partition('=')[0]}: " if "=" in given else ""
    exit_code, stderr = run_here(given.split(), monkeypatch, capsys)
    said = f"error: {key}runs/gone: cannot be read: No such file or directory; give the out_dir of a run\n"
    assert (exit_code, stderr) == (CHECKPOINT, said)


@pytest.mark.parametrize("command", ["list", "verify"])
def test_a_run_before_its_first_save_is_distinguished_from_other_folders(command, tmp_path, monkeypatch, capsys):
    assert_refused(["ckpt", command, str(tmp_path)], "contains no checkpoint", "give the out_dir", monkeypatch, capsys)
    (tmp_path / "metrics.json").write_text('{"status": "running", "steps": 0}')
    assert_refused(["ckpt", command, str(tmp_path)], str(tmp_path), "has saved no checkpoint yet", monkeypatch, capsys)


def test_generating_from_a_run_without_weights_is_refused(run_folder, monkeypatch, capsys):
    assert_refused(["generate", str(run_folder)], "model.safetensors", "has the run finished?", monkeypatch, capsys)


@pytest.mark.parametrize("kept", [0, 7, 40, -4], ids=lambda kept: f"first-{kept}-bytes")
def test_generating_from_a_truncated_weights_file_is_refused(kept, run_folder, monkeypatch, capsys):
    whole = save({"weight": torch.zeros(9)})
    (run_folder / "model.safetensors").write_bytes(whole[:kept])
    hint = "is not a complete safetensors file"
    assert_refused(["generate", str(run_folder)], "model.safetensors", hint, monkeypatch, capsys)
