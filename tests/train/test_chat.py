"""Fine-tuning on conversations: a model that started from a run answers what it was taught."""

import json
from contextlib import closing

import pytest
from typer.testing import CliRunner

from nsa import generate_tokens, load_run
from nsa.cli.main import app
from nsa.config import parse_config
from nsa.data.build import build_data
from nsa.data.chat import BUILT_IN_TEMPLATE
from nsa.data.tokenizers import ByteTokenizer
from nsa.errors import ConfigError
from nsa.train import train
from tests.distributed.launching import rows_of

ANSWERS = {"red": "rot", "blue": "blau", "green": "gruen", "sun": "sonne", "tree": "baum", "cat": "katze"}
REPEATED, BATCH = 64, 4
BASE = {
    "model": {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim_k": 16, "head_dim_v": 16}
    | {"attention": "dense"},  # the fastest on a CPU
    "data": {"source": "synthetic"},
    "train": {"steps": 1, "seq_len": 128, "batch_size": BATCH, "lr": 1e-2, "warmup_steps": 5, "eval_sequences": 1},
    "runtime": {"device": "cpu", "precision": "fp32", "threads": 1},
    "checkpoint": {"every": 0},
    "telemetry": {"tensorboard": False, "attention": False},
}


def asked(question):
    return [{"role": "user", "content": question}]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """Two epochs of conversations after a step of pretraining."""
    folder = tmp_path_factory.mktemp("chat")
    train(parse_config(BASE, "base"), folder / "base")
    talks = [{"messages": [*asked(q), {"role": "assistant", "content": a}]} for q, a in ANSWERS.items()] * REPEATED
    (folder / "chats.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    data = {"source": "chat", "paths": [str(folder / "chats.jsonl")], "packing": "best_fit", "validation_fraction": 0}
    config = BASE | {"data": data, "train": BASE["train"] | {"init_from": str(folder / "base")}}
    parsed = parse_config(config, "sized")
    sequences = build_data(parsed.data, parsed.train, ByteTokenizer()).train.sequences
    config["train"]["steps"] = 2 * sequences.count // BATCH
    train(parse_config(config, "tuned"), folder / "tuned")
    (folder / "chats.jsonl").unlink()  # the run is complete without it
    return folder / "tuned"


def test_two_epochs_teach_a_tiny_model_the_answers(tuned):
    assert float(rows_of(tuned)[-1]["loss"]) < 0.3
    run = load_run(tuned)
    with closing(run.chat_tokenizer()) as chat:
        prompts = [chat.prompt(asked(question)) for question in ANSWERS]
    texts = dict.fromkeys(range(len(prompts)), "")
    for piece in generate_tokens(run, prompts, temperature=0.0, max_tokens=20):
        texts[piece.prompt] += piece.text
    assert [*texts.values()] == [*ANSWERS.values()]


def test_a_step_without_an_answer_changes_nothing_that_is_not_finite(tmp_path):
    talk = {"messages": [*asked("?" * 200), {"role": "assistant", "content": "!"}]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(talk))
    data = {"source": "chat", "paths": [str(tmp_path / "chats.jsonl")], "validation_fraction": 0}
    config = BASE | {"data": data, "train": BASE["train"] | {"steps": 3, "seq_len": 16, "batch_size": 1}}
    train(parse_config(config, "test"), tmp_path / "run")
    rows = rows_of(tmp_path / "run")
    assert [row["skipped"] for row in rows] == ["0"] * 3
    assert 0.0 in [float(row["loss"]) for row in rows]


def test_the_command_renders_prompts_as_messages(tuned):
    options = ["generate", str(tuned), "--prompt", "red", "--prompt", "sun", "--temperature", "0"]
    shown = CliRunner().invoke(app, [*options, "--chat"], catch_exceptions=False)
    assert shown.stdout == "--- prompt 1 ---\nred\nrot\n--- prompt 2 ---\nsun\nsonne\n"
    samples = [json.loads(line) for line in (tuned / "samples.jsonl").read_text().splitlines()]
    assert [(sample["prompt"], sample["text"]) for sample in samples] == [("red", "rot"), ("sun", "sonne")]
    assert [sample["settings"]["chat"] for sample in samples] == [True, True]


def test_a_run_keeps_its_template_and_another_run_has_none(tuned, tmp_path):
    assert (tuned / "chat_template.jinja").read_text() == BUILT_IN_TEMPLATE
    own = tmp_path / "own.jinja"
    own.write_text("{{ messages[0].content }}")
    assert load_run(tuned, overrides=[f"data.chat_template={own}"]).chat_template == own.read_text()
    with pytest.raises(ConfigError, match=r"data\.chat_template: .* has no chat template"):
        load_run(tuned.parent / "base").chat_tokenizer()
