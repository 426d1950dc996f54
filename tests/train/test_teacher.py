"""`train.freeze` and `train.teacher`: part of a model learns, from another model's predictions."""

import csv

import pytest
import torch

from nsa import load_run
from nsa.data.loader import Batch
from nsa.data.tokenizers import ByteTokenizer
from nsa.errors import CheckpointError, ConfigError
from nsa.nn.loss import divergence_sum
from nsa.train import train
from nsa.train.state import build_state
from nsa.train.step import train_step
from tests.checkpoint.helpers import small, train_until


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense") / "run"
    train(small("model.attention=dense", "train.seed=3"), folder)
    return folder


def losses(folder):
    with (folder / "training.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def test_the_loss_is_the_divergence_from_the_teacher(dense, tmp_path):
    from nsa.data.tokenizers import load_tokenizer

    config = small(f"train.teacher={dense}", "train.seed=4")
    state = build_state(config, load_tokenizer("bytes"))
    state.teacher = load_run(dense).model
    tokens = torch.randint(0, 255, (2, 33))
    targets = tokens[:, 1:].clone()
    targets[0, :10] = -100
    batch = Batch(tokens[:, :-1], targets, None)
    with torch.no_grad():
        student, teacher = (m(tokens[:, :-1]).softmax(-1) for m in (state.model, state.teacher))
    by_hand = (teacher * (teacher / student).log()).sum(-1)[targets != -100].mean()
    result = train_step(state, [batch], int((targets != -100).sum()), lr=0.0)
    assert result.loss == pytest.approx(float(by_hand), rel=1e-4)


def test_a_model_does_not_diverge_from_itself(dense, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(dense.parent))
    at_home = f"~/{dense.name}"
    config = small("model.attention=dense", f"train.init_from={at_home}", f"train.teacher={at_home}", "train.lr=1e-9")
    train(config, tmp_path / "run")
    assert max(map(abs, losses(tmp_path / "run"))) < 1e-5


def test_a_student_resumes_to_the_bit(dense, tmp_path):
    overrides = (f"train.teacher={dense}", "train.freeze=['*', '!*.attention.gate.*', '!head.weight']")
    train(small(*overrides), tmp_path / "whole")
    train_until(3, tmp_path / "split", *overrides)
    train(small(*overrides), tmp_path / "split")
    whole, split = (load_run(tmp_path / name).model.state_dict() for name in ("whole", "split"))
    assert all(torch.equal(whole[name], split[name]) for name in whole)
    start = build_state(small(*overrides), load_run(dense).tokenizer).model.state_dict()
    moved = {name for name in whole if not torch.equal(whole[name], start[name])}
    assert moved
    assert all(".attention.gate." in name or name == "head.weight" for name in moved), moved


def test_weights_that_are_frozen_at_random_values_are_reported(dense, tmp_path, capsys):
    frozen = ["model.attention=dense", "train.freeze=['blocks.0.*']", "train.steps=1"]
    train(small(*frozen), tmp_path / "random")
    assert "warning: the frozen weights are random: set train.init_from" in capsys.readouterr().out
    train(small(*frozen, f"train.init_from={dense}"), tmp_path / "started")
    assert "frozen weights are random" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ("['blocks.9.*']", "'blocks.9.*' matches no parameter"),
        ("['*']", "leaves no trainable parameter"),
        ("['*', '!gates']", "'!gates' matches no parameter"),
    ],
)
def test_invalid_patterns_are_refused(tmp_path, patterns, message):
    with pytest.raises(ConfigError, match=message.replace("*", r"\*")):
        train(small(f"train.freeze={patterns}"), tmp_path / "run")


def test_freezing_all_but_an_index_that_short_sequences_do_not_train_says_why():
    msa = ["model.attention=msa", "msa.block=16", "msa.num_selected=2", "train.freeze=['*', '!*.index_*']"]
    with pytest.raises(
        ConfigError, match=r"no trainable parameter; blocks\.0\..*index_q\.weight .*seq_len is too short"
    ):
        build_state(small(*msa, "train.seq_len=32"), ByteTokenizer())
    assert len(build_state(small(*msa, "train.seq_len=33"), ByteTokenizer()).trainable) == 2


def test_a_teacher_of_another_vocabulary_is_refused(dense, tmp_path):
    with pytest.raises(ConfigError, match=r"train\.teacher: .* another vocabulary"):
        train(small("model.vocab_size=300", f"train.teacher={dense}"), tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"train\.teacher: .*nowhere: cannot be read"):
        train(small(f"train.teacher={tmp_path / 'nowhere'}"), tmp_path / "run2")


def test_a_teacher_may_have_its_vocabulary_in_another_file(tmp_path):
    import json

    from nsa.data.vocabulary import train_bpe

    file, other = tmp_path / "a.json", tmp_path / "b.json"
    train_bpe(["the same text " * 20], file, vocab_size=260, max_bytes=1 << 16)
    spec = json.loads(file.read_text())
    spec["model"]["merges"] = [" ".join(pair) for pair in spec["model"]["merges"]]
    other.write_text(json.dumps(spec | {"padding": None, "truncation": None}, indent=2))
    train(small("model.attention=dense", f"data.tokenizer={file}", "train.steps=2"), tmp_path / "teacher")
    student = small(f"data.tokenizer={other}", f"train.teacher={tmp_path / 'teacher'}", "train.steps=2")
    train(student, tmp_path / "student")
    assert max(losses(tmp_path / "student")) > 0
    spec["model"]["merges"].reverse()
    other.write_text(json.dumps(spec))
    with pytest.raises(ConfigError, match=r"train\.teacher: .* another vocabulary"):
        train(student, tmp_path / "refused")


def test_positions_that_do_not_count_add_nothing():
    student, teacher = torch.randn(1, 4, 7), torch.randn(1, 4, 7)
    counted = torch.tensor([[True, False, True, False]])
    want = divergence_sum(student[:, ::2], teacher[:, ::2], torch.ones(1, 2, dtype=torch.bool))
    torch.testing.assert_close(divergence_sum(student, teacher, counted), want)
