"""`nsa eval`: the numbers of a loop written by hand, in tables, a JSON file and figures."""

import json
import math
import shutil
import sys
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import nsa
from nsa.checkpoint.export import write_weights
from nsa.cli.main import app
from nsa.data.build import build_data
from nsa.data.loader import Loader
from nsa.data.prepare import prepare
from nsa.data.recall import Prompts
from nsa.data.sources.text import TextSource
from nsa.data.tasks import TASKS, TaskPrompts
from nsa.data.token_shards import ShardTokens
from nsa.data.tokenizers import ByteTokenizer
from nsa.errors import CheckpointError, ConfigError, DataError, LaunchError, NSAError
from nsa.evals import scoring
from nsa.evals.evaluate import DEPTHS
from nsa.evals.evaluate import evaluate as evaluate_run
from nsa.train import train
from tests.checkpoint.helpers import small, train_until
from tests.data.mirror import write_mirror


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run that nobody writes into."""
    folder = tmp_path_factory.mktemp("run") / "run"
    train(small("data.source=recall", "data.document_tokens=24", "train.steps=4"), folder)
    return folder


def evaluate(*arguments):
    return CliRunner().invoke(app, ["eval", *map(str, arguments)], catch_exceptions=False)


@pytest.mark.parametrize("isolated", [True, False])
def test_loss_by_position_equals_a_loop_over_tokens(isolated, folder, monkeypatch):
    monkeypatch.setitem(scoring.TOKENS_PER_PASS, "cpu", 100)
    monkeypatch.setattr(scoring, "TOKENS_PER_HEAD", 7)
    run = nsa.load_run(folder, overrides=[f"data.isolate_documents={isolated}", "train.eval_sequences=5"])
    with scoring.inference(run):
        found = scoring.loss_by_position(run, 40)
    by_hand: dict[int, list[float]] = {}
    data = build_data(run.config.data, run.config.train.model_copy(update={"seq_len": 40}), run.tokenizer)
    for number in range(5 * 32 // 40):
        row = data.validation.sequences.row(number)
        starts = row.starts if isolated else [0]
        for first, stop in zip(starts, [*starts[1:], 40], strict=True):
            with torch.no_grad():
                logits = run.model(torch.from_numpy(row.inputs[first:stop].astype("int64"))[None])[0]
            for place, target in enumerate(row.targets[first:stop].tolist()):
                nats = -logits[place].log_softmax(-1)[target].item()
                by_hand.setdefault(int(math.log2(place + 1)), []).append(nats)
    assert [(b.first, b.last, b.tokens) for b in found] == [
        (2**n, 40 if n == 5 else 2 ** (n + 1) - 1, len(values)) for n, values in sorted(by_hand.items())
    ]
    for bucket, (_, values) in zip(found, sorted(by_hand.items()), strict=True):
        assert bucket.loss == pytest.approx(sum(values) / len(values), rel=1e-5)


def test_the_loss_of_the_trained_length_is_the_validation_of_the_run(folder):
    run = nsa.load_run(folder)
    with scoring.inference(run):
        buckets = scoring.loss_by_position(run, 32)
    assert sum(bucket.tokens for bucket in buckets) == 64
    whole = nsa.load_run(folder, overrides=["data.isolate_documents=false"])
    with scoring.inference(whole):
        last = scoring.loss_by_position(whole, 32)[-1]
    assert (last.first, last.last, last.tokens) == (16, 32, 2 * 17)
    mean = sum(bucket.loss * bucket.tokens for bucket in buckets) / 64
    assert mean == pytest.approx(json.loads((folder / "metrics.json").read_text())["val_loss"], rel=1e-5)


def test_a_stream_is_read_until_the_tokens_of_a_validation_are_measured(folder, tmp_path):
    write_mirror(tmp_path, files=2, row_groups=40, rows=4)
    stream = ["data.source=fineweb_edu", f"data.paths=[{tmp_path}]", "data.validation_fraction=0.3"]
    run = nsa.load_run(folder, overrides=[*stream, "train.eval_sequences=100"])
    with scoring.inference(run):
        assert sum(bucket.tokens for bucket in scoring.loss_by_position(run, 8)) == 100 * 32


def test_conversations_without_an_answer_among_the_measured_sequences_are_an_error(folder, tmp_path):
    answer = {"role": "assistant", "content": "a"}
    talks = [[{"role": "user", "content": f"{n} " * 600}, answer] for n in range(60)]
    (tmp_path / "talk.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    data = ["data.source=chat", f"data.paths=[{tmp_path}/talk.jsonl]", "data.validation_fraction=0.2"]
    with pytest.raises(DataError, match="the first 1 validation sequences contain no answer of an assistant"):
        evaluate(folder, *data, "train.eval_sequences=16", "--lengths", "512")


def greedy(model, tokens, count):
    return [piece.token for piece in nsa.generate_tokens(model, [tokens.tolist()], max_tokens=count, temperature=0)]


def answered(prompts, model):
    """Makes the model's words the answers at even depths; those at odd depths stay."""

    def make(depths, number, make=prompts.make):
        prompt = make(depths, number)
        for (first, stop), depth in sorted(zip(prompt.spans, depths, strict=True)):
            if depth % 2 == 0:
                prompt.tokens[first:stop] = greedy(model, prompt.tokens[:first], stop - first)
        return prompt

    prompts.make = make
    return prompts


@pytest.mark.parametrize(
    "prompts",
    [
        *(lambda tokenizer, several=several: Prompts(tokenizer, 200, 5, several=several) for several in (True, False)),
        *(lambda tokenizer, task=task: TaskPrompts(tokenizer, task, 200, 200) for task in TASKS),
    ],
    ids=["several", "one", *TASKS],
)
def test_recall_equals_greedy_decoding_of_every_answer(prompts, folder, monkeypatch):
    monkeypatch.setitem(scoring.TOKENS_PER_PASS, "cpu", 700)
    run = nsa.load_run(folder)
    prompts = answered(prompts(run.tokenizer), run.model)
    samples, exact = 3, [0] * prompts.num_depths
    for number, depths in enumerate(prompts.questions(samples)):
        prompt = prompts.make(depths, number)
        for depth, (first, stop) in zip(depths, prompt.spans, strict=True):
            said = greedy(run.model, prompt.tokens[:first], stop - first)
            exact[depth] += said == prompt.tokens[first:stop].tolist()
    assert set(exact[::2]) == {samples}
    assert sum(exact[1::2]) < samples
    with scoring.inference(run):
        found = scoring.recall_by_depth(run, prompts, samples)
    assert found == [count / samples for count in exact]


def test_the_command_writes_tables_json_and_figures(folder, tmp_path):
    result = evaluate(folder, "--out", tmp_path / "new", "--lengths", "600,640", "--samples", 1)
    assert result.exit_code == 0
    assert "600 tokens are more than the 32 that the run trained on (train.seq_len)" in result.output
    assert "loss by position" in result.output
    assert "2 to 3" in result.output
    assert "1 to 1" not in result.output
    assert result.output.count("data    recall: endless generated documents") == 1
    assert "exact answers in %, keys: several" in result.output
    assert all(f" {10 * d}-{10 * d + 10} % " in result.output for d in range(DEPTHS[0])), "also on 80 columns"
    assert "exact answers in %, tracking" in result.output
    found = json.loads((tmp_path / "new" / "eval.json").read_text())
    assert found["trained_length"] == 32
    assert found["data"].startswith("recall: endless")
    assert [(row["length"], row["keys"]) for row in found["recall"]] == [
        (length, keys) for length in (600, 640) for keys in ("one", "several")
    ]
    assert all(len(row["by_depth"]) == DEPTHS[0] for row in found["recall"])
    assert [(row["length"], row["task"], row["levels"]) for row in found["tasks"]] == [
        (length, *task) for length in (600, 640) for task in (("tracking", [1, 2, 3, 4]), ("counting", [2, 4, 8]))
    ]
    page = (tmp_path / "new" / "eval.html").read_text()
    assert "model.safetensors · recall: endless generated documents" in page
    assert page.count("<svg") == 5
    assert page.count('class="cell') == 2 * 2 * DEPTHS[0] + 2 * (4 + 3), "a number for every length, depth and level"


def test_recall_is_left_out_where_the_tokenizer_has_no_numbers(tmp_path):
    """Their answers would have no token, and every answer would be right."""
    ids = {token: i for i, token in enumerate([*"abcdefghijklmnopqrstuvwxyz.", "<|endoftext|>"])}
    model = {"type": "BPE", "vocab": ids, "merges": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    settings = [f"data.tokenizer={tmp_path / 'tokenizer.json'}", "train.steps=1"]
    train(small(*settings), tmp_path / "run")
    printed = evaluate(tmp_path / "run", "--samples", 1).output
    assert "tokenizer.json cannot tell the words and numbers of recall documents apart" in " ".join(printed.split())
    assert "exact answers" not in printed
    found = json.loads((tmp_path / "run" / "eval.json").read_text())
    assert found["loss"][0]["loss"] > 0
    assert (found["recall"], found["tasks"]) == ([], [])
    assert (tmp_path / "run" / "eval.html").read_text().count("<svg") == 1
    with pytest.raises(ConfigError, match=r"data\.tokenizer: .* cannot tell the words and numbers of recall documents"):
        train(small(*settings, "data.source=recall"), tmp_path / "recall")


def test_numbers_that_are_not_finite_are_text_in_the_file(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "run")
    run = nsa.load_run(folder)
    run.model.norm.weight.data.fill_(math.nan)
    weights = dict(run.model.named_parameters())
    write_weights(tmp_path / "run" / "model.safetensors", weights, step=4)
    assert evaluate(tmp_path / "run", "--lengths", "256", "--samples", 1).exit_code == 0
    written = json.loads((tmp_path / "run" / "eval.json").read_text(), parse_constant=pytest.fail)
    assert written["loss"][0]["loss"] == written["loss"][0]["buckets"][0]["loss"] == "nan"


def test_figures_that_cannot_be_written_are_an_error_and_the_numbers_are_kept(folder, tmp_path):
    (tmp_path / "eval.html").mkdir()
    with pytest.raises(LaunchError, match=r"eval\.html: cannot be written: .* choose another path with --out"):
        evaluate(folder, "--out", tmp_path, "--lengths", "256", "--samples", 1)
    assert (tmp_path / "eval.json").exists()


def test_a_folder_that_cannot_be_made_is_an_error_before_anything_is_measured(folder, tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(ConfigError, match=r"--out: .*out cannot be used: File exists; choose another folder"):
        evaluate(folder, "--out", tmp_path / "out", "--lengths", "10")  # 10 is an error of the measurement


def test_a_disk_that_fills_up_is_an_error_that_names_the_file(folder, tmp_path, no_room):
    no_room("eval.html")
    with pytest.raises(
        NSAError, match=r"eval\.html: cannot be written: No space left on device; choose another .*--out"
    ):
        evaluate(folder, "--out", tmp_path, "--lengths", "256", "--samples", 1)
    assert json.loads((tmp_path / "eval.json").read_text())["loss"]


def test_the_weights_file_of_a_run_is_evaluated_like_the_run(folder):
    found = [nsa.load_run(path).config for path in (folder, folder / "model.safetensors")]
    assert found[0] == found[1]
    assert found[1].train.seq_len == 32


def test_overrides_that_change_the_numbers_are_recorded_with_them(folder, tmp_path):
    for options in (), ("nsa.window=5", "--override", "data.isolate_documents=false"):
        assert evaluate(folder, *options, "--out", tmp_path, "--lengths", "256", "--samples", 1).exit_code == 0
        given = " ".join(option for option in options if "=" in option)
        assert json.loads((tmp_path / "eval.json").read_text())["overrides"] == given
    assert given in (tmp_path / "eval.html").read_text()


def test_a_running_run_is_evaluated_at_its_newest_checkpoint(tmp_path):
    train_until(3, tmp_path / "run")
    for source in (tmp_path / "run", tmp_path / "run" / "checkpoints" / "latest"):
        evaluate(source, "--lengths", "256", "--samples", 1)
        found = json.loads((tmp_path / "run" / "eval.json").read_text())
        assert found["weights"].endswith("step_00000003")
        (tmp_path / "run" / "eval.json").unlink()
    assert not list((tmp_path / "run" / "checkpoints").rglob("eval.*"))


@pytest.mark.parametrize("text", ["", "many", "128,,256", "0", "-5", "1", "64,1000000000000", "9" * 30])
def test_text_that_is_not_a_list_of_lengths_is_refused(text, folder):
    with pytest.raises(ConfigError, match=r"--lengths: .* is not a list of lengths in tokens, 2 to 134,217,728;"):
        evaluate(folder, "--lengths", text)


def test_lengths_that_do_not_fit_are_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match="--lengths: 32 tokens are too few for a prompt with keys at 2 depths"):
        evaluate(folder)
    lines = []
    with pytest.raises(ConfigError, match="--lengths: 41 tokens are too few"):  # the first prompt fits
        evaluate_run(nsa.load_run(folder), [41, 300], 40, lines.append)
    assert not lines, "nothing was measured before"
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name * 500)
    text = ["data.source=text", f"data.paths=[{tmp_path}]", "data.validation_fraction=0.5"]
    with pytest.raises(
        DataError, match=r"--lengths: 512 does not fit the data: .* the training documents have 501; cho"
    ):
        evaluate(folder, *text, "--lengths", "256,512")
    with pytest.raises(
        ConfigError, match=r"data\.validation_fraction: .* text that the run trained on may be measured"
    ):
        evaluate(folder, text[2], "--lengths", "256")
    with pytest.raises(ConfigError, match=r"data\.\* overrides, with data\.validation_fraction=0\.5 for half of it"):
        evaluate(folder, *text[:2], "data.validation_fraction=0.0", "--lengths", "256")


def test_data_that_are_missing_are_not_blamed_on_a_length(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=rf"^data\.paths: no such folder: shards; relative paths start at {tmp_path}$"):
        evaluate(folder, "data.source=prepared", "data.paths=[shards]", "--lengths", "256")


def test_data_without_a_token_that_counts_are_an_error_of_the_data(folder, monkeypatch):
    """As of a mixture whose conversations have their answers further back."""
    real = Loader.batch

    def without_targets(loader, *rows):
        batch = real(loader, *rows)
        return replace(batch, targets=torch.full_like(batch.targets, -100))

    monkeypatch.setattr(Loader, "batch", without_targets)
    with pytest.raises(DataError, match=r"train\.eval_sequences: no validation sequence has a token that counts"):
        evaluate(folder, "--lengths", "256", "--samples", 1)


def test_prepared_shards_are_compared_with_their_hashes_once(folder, tmp_path, monkeypatch):
    (tmp_path / "texts").mkdir()
    for name in map(str, range(8)):
        (tmp_path / "texts" / f"{name}.txt").write_text(name * 500)
    prepare(TextSource([str(tmp_path / "texts")]), ByteTokenizer(), tmp_path / "shards", workers=1)
    compared, check = [], ShardTokens.check
    monkeypatch.setattr(ShardTokens, "check", lambda shard: (compared.append(shard.path), check(shard)))
    data = ["data.source=prepared", f"data.paths=[{tmp_path / 'shards'}]", "data.validation_fraction=0.5"]
    result = evaluate(folder, *data, "--out", tmp_path / "new", "--lengths", "256,300", "--samples", 1)
    assert result.exit_code == 0
    assert compared == sorted((tmp_path / "shards").glob("*.tokens"))


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="not a run folder"):
        evaluate(tmp_path)
    (tmp_path / "config.yaml").write_text("train: {seq_len: 128}\nmodel: {dim: 32, n_layers: 1}\n")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: no such file; has the run finished"):
        evaluate(tmp_path)


def test_the_evaluation_harness_is_named_where_it_is_not_installed(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ConfigError, match=r"--lm-eval: the package lm_eval is not installed: pip install lm_eval"):
        evaluate(folder, "--lm-eval", "lambada_openai")
    with pytest.raises(ConfigError, match="leave --lengths and --selection out"):
        evaluate(folder, "--lm-eval", "lambada_openai", "--lengths", "16")
