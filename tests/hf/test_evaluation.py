"""lm-evaluation-harness on exported folders and on runs, with tasks and data that lie beside them."""

import json
import math

import pytest
import torch
from typer.testing import CliRunner

from nsa.cli.main import app
from nsa.errors import ConfigError, DataError
from nsa.hf.exporter import export_model
from tests.hf import runs, test_stock

pytest.importorskip("transformers")
lm_eval = pytest.importorskip("lm_eval", reason="needs lm_eval: pip install lm_eval")

TASK = """task: next_number
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: {output_type}
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: {metric}
"""
# From 49 tokens on, queries of the stock model choose blocks.
ROWS = [{"text": "1 2 3" + " and more" * 6 * n, "answer": f" {n}"} for n in range(4)]


@pytest.fixture
def task(tmp_path, monkeypatch):
    """Writes a task into the folder tasks."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    data, folder = tmp_path / "numbers.jsonl", tmp_path / "tasks"
    data.write_text("\n".join(json.dumps(row) for row in ROWS))
    folder.mkdir()

    def write(**settings):
        (folder / "next_number.yaml").write_text(TASK.format(data=data, **settings))
        return folder

    return write


def encoded(run, text):
    return [run.tokenizer.separator, *run.tokenizer.encode(text).tolist()]


def likelihood(run, start, answer):
    with torch.no_grad():
        logits = run.model(torch.tensor([start + answer]))[0, len(start) - 1 : -1].log_softmax(-1)
    return float(logits[range(len(answer)), answer].sum())


@pytest.mark.parametrize("kind", ["stock", "with code"])
def test_likelihoods_are_those_of_the_model(tmp_path, task, kind):
    from lm_eval.tasks import TaskManager

    folder = tmp_path / "run"
    run = test_stock.make_run(folder, {}, {}) if kind == "stock" else runs.make_run(folder, "mean")
    export_model(run, tmp_path / "hf")
    options = "" if kind == "stock" else ",trust_remote_code=True"
    found = lm_eval.simple_evaluate(
        model="hf",
        model_args=f"pretrained={tmp_path / 'hf'},device=cpu,dtype=float32{options}",
        tasks=["next_number"],
        task_manager=TaskManager(
            include_path=str(task(output_type="loglikelihood", metric="perplexity")), include_defaults=False
        ),
        batch_size=2,
        bootstrap_iters=0,
    )
    by_hand = [likelihood(run, encoded(run, row["text"]), encoded(run, row["answer"])[1:]) for row in ROWS]
    measured = found["results"]["next_number"]["perplexity,none"]
    assert measured == pytest.approx(math.exp(-sum(by_hand) / len(by_hand)), rel=1e-3)


def test_the_command_runs_the_tasks_of_a_folder_on_a_run(tmp_path, task):
    run = runs.make_run(tmp_path / "run", "mean")
    tasks = task(output_type="loglikelihood_rolling", metric="bits_per_byte")
    command = ["eval", str(tmp_path / "run"), "--lm-eval", str(tasks)]
    printed = CliRunner().invoke(app, command, catch_exceptions=False).output
    # The harness puts a separator before the text and also scores the one that the tokenizer adds.
    nats = sum(likelihood(run, [run.tokenizer.separator], encoded(run, row["answer"])) for row in ROWS)
    want = -nats / math.log(2) / sum(len(row["answer"]) for row in ROWS)
    found = json.loads((tmp_path / "run" / "lm_eval.json").read_text())
    assert found["results"]["next_number"]["bits_per_byte,none"] == pytest.approx(want, rel=1e-4)
    assert found["samples"] == {"next_number": 4}
    assert f"{want:.4f}" in printed
    (tmp_path / "empty").mkdir()
    (tmp_path / "numbers.jsonl").unlink()
    for wanted, problem, text in (
        (tmp_path / "empty", ConfigError, "has no task file"),
        (",", ConfigError, "has no task file"),
        (tasks, DataError, "cannot be run: Unable to find"),
    ):
        with pytest.raises(problem, match=text):
            CliRunner().invoke(app, [*command[:-1], str(wanted)], catch_exceptions=False)


@pytest.mark.long  # reads the names of all tasks of the harness
def test_a_name_that_is_not_a_task_is_an_error(tmp_path):
    runs.make_run(tmp_path / "run", "mean")
    command = ["eval", str(tmp_path / "run"), "--lm-eval", "no_such_task"]
    with pytest.raises(ConfigError, match="'no_such_task' is neither a folder nor a task of lm_eval"):
        CliRunner().invoke(app, command, catch_exceptions=False)
