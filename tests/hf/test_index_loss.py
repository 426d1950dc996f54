"""The index of MSA learns in transformers as it does in this project's trainer."""

from functools import partial

import pytest
import torch
from torch.nn.functional import cross_entropy, pad

from nsa.nn.loss import next_token_loss
from tests.hf.runs import SIZES

transformers = pytest.importorskip("transformers")
from nsa.hf import NSAForCausalLM, NSALMConfig  # noqa: E402  (needs transformers)
from tests.hf.test_loading import check_one_graph  # noqa: E402  (needs transformers)

MODEL = SIZES | {"n_layers": 3, "layer_pattern": ["msa", "dense"], "qk_norm": True}
MSA = {"block": 16, "num_selected": 3, "index_dim": 16, "loss_weight": 0.5, "warmup_steps": 5}  # dense up to 48 tokens
LENGTHS = (100, 61, 30)


def make_model():
    torch.manual_seed(3)
    return NSAForCausalLM(NSALMConfig(256, model=MODEL, msa=MSA)).train()


def documents():
    """Tokens and labels. Only answers have labels, and nothing predicts the first token."""
    torch.manual_seed(4)
    rows = [torch.randint(0, 255, (length,)) for length in LENGTHS]
    return [
        (row, torch.where((torch.arange(len(row)) % 7 > 2) & (torch.arange(len(row)) > 0), row, -100)) for row in rows
    ]


def gradients(loss, model):
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True))


def ours(model, rows):
    """The cross-entropy, the index loss and the number of targets, from single rows in the decoder of the trainer."""
    total, targets = 0.0, 0
    for row, labels in rows:
        wanted = pad(labels[1:], (0, 1), value=-100)[None]
        total = total + model.decoder(
            row[None], loss=partial(next_token_loss, targets_BS=wanted), counted=wanted != -100
        )
        targets += int((wanted != -100).sum())
    assert total[2] > 0
    return total[0] / targets, total[1] / (2 * 2 * total[2]), targets  # two MSA layers with two groups


def padded(rows, side):
    width = max(len(row) for row, _ in rows)
    place = lambda x, value: pad(x, (width - len(x), 0) if side == "left" else (0, width - len(x)), value=value)  # noqa: E731
    return {
        "input_ids": torch.stack([place(row, 7) for row, _ in rows]),
        "labels": torch.stack([place(labels, -100) for _, labels in rows]),
        "attention_mask": torch.stack([place(torch.ones_like(row), 0) for row, _ in rows]),
    }


def packed(rows, argument):
    tokens, labels = (torch.cat(parts)[None] for parts in zip(*rows, strict=True))
    borders = {"position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None]}
    if argument == "cu_seq_lens_q":
        borders = {argument: torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)}
    return {"input_ids": tokens, "labels": labels, **borders}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("form", ["left", "right", "position_ids", "cu_seq_lens_q"])
def test_the_loss_and_its_gradients_are_those_of_the_trainer(form, checkpointing):
    model, rows = make_model(), documents()
    plain, index_loss, _ = ours(model, rows)
    want = gradients(plain + 0.5 * index_loss, model)
    if checkpointing:
        model.gradient_checkpointing_enable()
    found = model(**(padded if form in ("left", "right") else packed)(rows, form))
    torch.testing.assert_close(found.loss, plain + 0.5 * index_loss)
    torch.testing.assert_close(found.aux_loss, index_loss.detach())
    assert not found.aux_loss.requires_grad
    for name, gradient in gradients(found.loss, model).items():
        torch.testing.assert_close(gradient, want[name], atol=1e-6, rtol=1e-4)


def test_only_the_index_learns_from_its_loss():
    model, inputs = make_model(), padded(documents()[:1], "right")
    with_index, without = (gradients(model.train(mode)(**inputs).loss, model) for mode in (True, False))
    assert sum(".index_" in name for name in with_index) == 2 * 4
    for name, gradient in with_index.items():
        if ".index_" in name:
            assert gradient.abs().max() > 0
            assert without[name] is None
        else:
            assert torch.equal(gradient, without[name]), name


def test_evaluation_gives_the_cross_entropy_alone():
    model, inputs = make_model(), padded(documents()[:1], "right")
    with torch.no_grad():
        in_training = model(**inputs)
    logits = in_training.logits[0, :-1]
    for found in (in_training, model.eval()(**inputs)):
        assert found.aux_loss is None
        torch.testing.assert_close(found.loss, cross_entropy(logits, inputs["labels"][0, 1:]))
    assert len(model(**inputs, return_dict=False)) == 2


def test_a_loss_that_trains_no_index_is_reported_once(caplog, monkeypatch):
    monkeypatch.setattr(transformers.utils.logging.get_logger(), "propagate", True)
    transformers.utils.logging.warning_once.cache_clear()
    model, tokens = make_model(), torch.randint(0, 255, (1, 60))
    for _ in range(2):
        assert model(tokens).loss is None
        model.base_model(tokens)
    assert caplog.text.count("The index of MSA is not trained") == 1


def test_other_ways_to_give_targets_count_the_same_queries():
    model, inputs = make_model(), padded(documents()[:1], "right")
    want, labels = model(**inputs), inputs["labels"]
    found = model(**inputs, shift_labels=pad(labels[:, 1:], (0, 1), value=-100))
    assert torch.equal(found.loss, want.loss)
    other = inputs | {"labels": labels.masked_fill(labels == -100, 255)}
    assert torch.equal(model(**other, ignore_index=255).loss, want.loss)
    tail = inputs | {"labels": labels[:, 60:].clone()}
    whole = inputs | {"labels": labels.index_fill(1, torch.arange(61), -100)}
    assert torch.equal(model(**tail, logits_to_keep=40).aux_loss, model(**whole).aux_loss)


def test_batches_of_a_step_add_up_to_their_mean():
    model, rows = make_model(), documents()[:2]
    parts = [ours(model, [row]) for row in rows]
    targets = sum(count for *_, count in parts)
    want = sum((plain + 0.5 * index_loss) * count / targets for plain, index_loss, count in parts)
    for items in (targets, torch.tensor(targets)):
        losses = [model(**padded([row], "right"), num_items_in_batch=items).loss for row in rows]
        torch.testing.assert_close(sum(losses), want)


def test_the_trainer_accumulates_as_it_would_compute_a_whole_batch(tmp_path):
    tokens = torch.randint(0, 255, (2, 80))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    models = {}
    for size in (2, 1):
        settings = transformers.TrainingArguments(
            str(tmp_path), per_device_train_batch_size=size, gradient_accumulation_steps=2 // size, max_steps=1,
            optim="sgd", learning_rate=1.0, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        models[size] = make_model()
        transformers.Trainer(models[size], settings, train_dataset=data).train()
    start, whole, split = (model.state_dict() for model in (make_model(), models[2], models[1]))
    for name, weight in whole.items():
        assert not torch.equal(weight, start[name]), name
        torch.testing.assert_close(split[name], weight, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("form", ["right", "position_ids"])
def test_short_sequences_give_the_index_a_gradient_of_zero(form):
    """Not none, which DistributedDataParallel would wait for."""
    model, tokens = make_model(), torch.randint(0, 255, (1, 48))
    inputs = {"input_ids": tokens, "labels": tokens}
    if form == "position_ids":
        inputs = {name: x.repeat(1, 2) for name, x in (inputs | {"position_ids": torch.arange(48)[None]}).items()}
    found = model(**inputs)
    assert found.aux_loss == 0.0
    assert torch.equal(found.loss, model.eval()(**inputs).loss)
    for name, gradient in gradients(found.loss, model).items():
        assert bool(gradient.any()) == (".index_" not in name), name


@pytest.mark.parametrize("layers", ["q", "index_q"])
def test_adapters_train_the_index_only_if_they_adapt_it(layers):
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(r=4, target_modules=rf".*attention\.{layers}", task_type="CAUSAL_LM")
    model, inputs = peft.get_peft_model(make_model(), adapters), padded(documents()[:1], "right")
    found = model(**inputs)
    assert (found.aux_loss is None) == (layers == "q")
    found.loss.backward()
    trained = [name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()]
    assert len(trained) == {"q": 3, "index_q": 2}[layers]  # the second factors: they start at 0
    assert all(f".{layers}.lora_B" in name for name in trained)


def test_the_loss_is_part_of_one_graph():
    check_one_graph(make_model(), backend="eager")
