"""lm-evaluation-harness on an exported folder, with a task and data that lie beside it."""

import json
import math

import pytest
import torch

from nsa.hf.exporter import export_model
from tests.hf.runs import make_run

pytest.importorskip("transformers")
lm_eval = pytest.importorskip("lm_eval", reason="needs lm_eval: pip install lm_eval")

TASK = """task: next_number
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
  - metric: perplexity
"""


def test_likelihoods_are_those_of_the_model(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from lm_eval.tasks import TaskManager

    run = make_run(tmp_path / "run", "mean")
    export_model(run, tmp_path / "hf")
    rows = [{"text": "1 2 3" + " and more" * n, "answer": f" {n}"} for n in range(4)]
    data = tmp_path / "numbers.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "next_number.yaml").write_text(TASK.format(data=data))
    found = lm_eval.simple_evaluate(
        model="hf",
        model_args=f"pretrained={tmp_path / 'hf'},trust_remote_code=True,device=cpu,dtype=float32",
        tasks=["next_number"],
        task_manager=TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False),
        batch_size=2,
        bootstrap_iters=0,
    )
    by_hand = []
    for row in rows:
        start = [run.tokenizer.separator, *run.tokenizer.encode(row["text"]).tolist()]
        answer = run.tokenizer.encode(row["answer"]).tolist()
        with torch.no_grad():
            logits = run.model(torch.tensor([start + answer]))[0, len(start) - 1 : -1].log_softmax(-1)
        by_hand.append(float(logits[range(len(answer)), answer].sum()))
    measured = found["results"]["next_number"]["perplexity,none"]
    assert measured == pytest.approx(math.exp(-sum(by_hand) / len(by_hand)), rel=1e-3)
