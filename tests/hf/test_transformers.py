"""A trained run in transformers: loaded, generating, trained further, with adapters, and back."""

import copy
import json
import locale
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from nsa import generate_tokens, load_run
from nsa.data.tokenizers import load_tokenizer
from nsa.errors import ArgumentError, CheckpointError, ConfigError
from nsa.hf.exporter import export_model, model_card
from nsa.hf.importer import import_model
from nsa.hf.tokenizer import fast_tokenizer
from tests import warm
from tests.distributed.launching import environment, wait_all
from tests.hf.runs import TEXT, VARIANTS, make_run, tokenizer_named

transformers = pytest.importorskip("transformers")
from transformers.dynamic_module_utils import get_imports  # noqa: E402  (needs transformers)

from nsa.hf import NSACache, NSAForCausalLM, NSALMConfig  # noqa: E402
from nsa.hf.modeling import CODE_FILE  # noqa: E402

PROMPTS = ["def main(", "import torch\n\n\nclass Model:", "x"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run"), "mean")


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf") / "model"
    export_model(run, folder)
    return folder


def load(folder, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def test_an_export_leaves_the_files_of_another_one_alone(run, tmp_path):
    """Of one into the same folder that is being written by another process."""
    other = tmp_path / ".model.part" / "config.json"
    other.parent.mkdir()
    other.write_text("{}")
    export_model(run, tmp_path / "model")
    assert other.read_text() == "{}"
    assert {path.name for path in tmp_path.iterdir()} == {"model", ".model.part"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_text_survive_the_round_trip(tmp_path, variant):
    run = make_run(tmp_path / "run", variant)
    export_model(run, tmp_path / "hf")
    model = load(tmp_path / "hf")
    tokens = torch.randint(0, 255, (2, 150))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, run.model(tokens), atol=1e-5, rtol=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    assert not inputs["attention_mask"].all()
    drawn = model.generate(**inputs, max_new_tokens=20, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    want = {row: [] for row in range(len(PROMPTS))}
    for piece in generate_tokens(run, PROMPTS, max_tokens=20, temperature=0.0):
        want[piece.prompt] += [] if piece.token is None else [piece.token]
    separator = run.tokenizer.separator
    got = {row: [t for t in ids.tolist() if t != separator] for row, ids in enumerate(drawn)}
    assert got == want
    back = import_model(tmp_path / "hf", tmp_path / "back")
    assert back.model.layer_kinds() == run.config.model.layer_kinds()
    with torch.no_grad():
        torch.testing.assert_close(load_run(tmp_path / "back").model(tokens), run.model(tokens), atol=0, rtol=0)


def test_half_precision_stays_close(run, exported):
    model = load(exported, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    tokens = torch.randint(0, 255, (1, 100))
    with torch.no_grad():
        got, want = model(tokens).logits.float().log_softmax(-1), run.model(tokens).log_softmax(-1)
    assert float((want.exp() * (want - got)).sum(-1).mean()) < 1e-3


def test_padding_on_either_side_changes_nothing(run, exported):
    model = load(exported)
    rows = [torch.randint(0, 255, (length,)) for length in (90, 33, 1)]
    for side in ("left", "right"):
        tokens, mask = torch.zeros(3, 90, dtype=torch.int64), torch.zeros(3, 90, dtype=torch.int64)
        for i, row in enumerate(rows):
            at = slice(90 - len(row), None) if side == "left" else slice(0, len(row))
            tokens[i, at], mask[i, at] = row, 1
        with torch.no_grad():
            logits = model(tokens, attention_mask=mask).logits
            for i, row in enumerate(rows):
                torch.testing.assert_close(logits[i, mask[i].bool()], run.model(row[None])[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lengths", [(70, 33, 1), (40, 33, 1)], ids=["some rows", "all rows"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_generation_continues_after_padding_on_either_side(exported, use_cache, lengths):
    model = load(exported)
    rows = [torch.randint(0, 255, (length,)) for length in lengths]
    options = {"max_new_tokens": 8, "do_sample": False, "use_cache": use_cache}
    want = [model.generate(row[None], **options)[0, len(row) :].tolist() for row in rows]
    for side in ("right", "left"):
        tokens, mask = torch.zeros(3, 70, dtype=torch.int64), torch.zeros(3, 70, dtype=torch.int64)
        for i, row in enumerate(rows):
            at = slice(70 - len(row), None) if side == "left" else slice(0, len(row))
            tokens[i, at], mask[i, at] = row, 1
        drawn = model.generate(tokens, attention_mask=mask, **options)[:, 70:].tolist()
        assert [row[: len(alone)] for row, alone in zip(drawn, want, strict=True)] == want, side
    if use_cache:  # a first chunk may be padding alone
        chunked = model.generate(tokens, attention_mask=mask, prefill_chunk_size=16, **options)[:, 70:].tolist()
        assert chunked == drawn


def test_positions_that_restart_are_packed_documents(run, exported):
    model = load(exported)
    parts = [torch.randint(0, 255, (1, length)) for length in (70, 41)]
    position_ids = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
    with torch.no_grad():
        alone = torch.cat([run.model(part) for part in parts], 1)
        for given in (
            {"position_ids": position_ids},
            {"position_ids": position_ids, "attention_mask": torch.ones(1, 111)},
            {"cu_seq_lens_q": torch.tensor([0, 70, 111], dtype=torch.int32), "cu_seq_lens_k": None},
        ):
            packed = model(torch.cat(parts, 1), **given).logits
            torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)
    documents = {"position_ids": position_ids, "cu_seq_lens_q": torch.tensor([0, 70, 111])}
    for name, value in documents.items():
        for given in ({"attention_mask": torch.tensor([[0] + [1] * 110])}, {"use_cache": True}):
            with pytest.raises(ArgumentError, match=f"{name}: packed documents are not supported together"):
                model(torch.cat(parts, 1), **{name: value}, **given)
    with pytest.raises(ArgumentError, match="seq_idx: needs position_ids or cu_seq_lens_q"):
        model(torch.cat(parts, 1), seq_idx=torch.tensor([[0] * 70 + [1] * 41]))


@pytest.mark.parametrize("first", [0, 2])  # DataCollatorWithFlattening(position_ids_start=2)
def test_each_row_may_pack_other_documents(run, exported, first):
    lengths = ((70, 41), (20, 90, 1))
    tokens = torch.randint(0, 255, (2, 111))
    position_ids = torch.stack([torch.cat([torch.arange(n) + first for n in row]) for row in lengths])
    with torch.no_grad():
        packed = load(exported)(tokens, position_ids=position_ids).logits
        alone = [torch.cat([run.model(part[None])[0] for part in tokens[i].split(lengths[i])]) for i in (0, 1)]
    torch.testing.assert_close(packed, torch.stack(alone), atol=1e-5, rtol=1e-5)


def test_the_base_model_returns_the_input_of_the_head(exported):
    """TRL computes the head and the loss itself."""
    model = load(exported)
    tokens, mask = torch.randint(0, 255, (2, 50)), torch.ones(2, 50)
    mask[0, 40:] = 0
    with torch.no_grad():
        found = model.base_model(input_ids=tokens, attention_mask=mask, use_cache=True)
        torch.testing.assert_close(model.decoder.head(found.last_hidden_state), model(tokens, mask).logits)
    assert found.past_key_values.get_seq_length() == 50
    assert next(model.base_model.parameters()) is next(model.decoder.parameters())


def test_assisted_decoding_removes_rejected_tokens(run, exported):
    model = load(exported)
    tokens = torch.randint(0, 255, (1, 60))
    plain = model.generate(tokens, max_new_tokens=30, do_sample=False)
    drafted = model.generate(tokens, max_new_tokens=30, do_sample=False, prompt_lookup_num_tokens=4)
    assert torch.equal(plain, drafted)
    again = torch.randint(0, 255, (1, 90)).repeat(1, 3)  # the prompt is the draft, more than rings hold by default
    drafted = model.generate(again, max_new_tokens=5, do_sample=False, prompt_lookup_num_tokens=80)
    assert torch.equal(model.generate(again, max_new_tokens=5, do_sample=False), drafted)
    assisted = model.generate(tokens, max_new_tokens=60, do_sample=False, assistant_model=load(exported))
    assert torch.equal(assisted[:, :90], plain)


def test_several_answers_to_a_prompt_and_a_mask_that_does_not_fit(exported):
    model = load(exported)
    tokens = torch.randint(0, 255, (2, 20))
    torch.manual_seed(1)
    assert model.generate(tokens, max_new_tokens=5, do_sample=True, num_return_sequences=3).shape == (6, 25)
    for shape in ((1, 20), (2, 19), (2, 1, 20)):
        with pytest.raises(ArgumentError, match="attention_mask"):
            model(tokens, attention_mask=torch.ones(shape))


def test_a_saved_model_loads_again_and_one_without_a_tensor_does_not(exported, tmp_path):
    model = load(exported)
    model.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "modeling_nsa.py").is_file()
    tensors = load_file(tmp_path / "again" / "model.safetensors")
    del tensors["decoder.blocks.0.attention.gate.out.bias"]
    save_file(tensors, tmp_path / "again" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"no tensor for decoder\.blocks\.0\.attention\.gate\.out\.bias"):
        load(tmp_path / "again")
    with pytest.raises(CheckpointError, match=r"no tensor for .*gate\.out\.bias"):
        import_model(tmp_path / "again", tmp_path / "run")
    with pytest.raises(ConfigError, match="has nsa layers already"):
        import_model(exported, tmp_path / "run", attention="nsa")


def test_without_a_cache_generation_is_the_same(exported):
    model = load(exported)
    tokens = torch.randint(0, 255, (2, 45))
    cached, plain = (model.generate(tokens, max_new_tokens=20, do_sample=False, use_cache=c) for c in (True, False))
    assert torch.equal(cached, plain)
    drawn = model.generate(tokens, max_new_tokens=4, do_sample=False, use_cache=False, num_beams=2)
    assert drawn.shape == (2, 49)


def test_the_configuration_may_turn_the_cache_off_and_the_trainer_does_not(exported, tmp_path):
    def has_cache(model):
        drawn = model.generate(torch.tensor([[1, 2]]), max_new_tokens=2, return_dict_in_generate=True)
        return drawn.past_key_values is not None

    assert not has_cache(load(exported, use_cache=False))
    model = load(exported)
    settings = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    transformers.Trainer(model, settings)
    assert model.config.use_cache is False
    model.save_pretrained(tmp_path / "again")
    assert all(map(has_cache, (model, load(tmp_path / "again"))))


def test_a_cache_starts_small_and_grows(run):
    model = NSAForCausalLM(
        NSALMConfig(256, 1 << 20, model=run.config.model.model_dump(), nsa=run.config.nsa.model_dump())
    ).eval()
    tokens = torch.randint(0, 255, (2, 400))
    with torch.no_grad():
        first = model(tokens[:, :40], use_cache=True)
        assert sum(first.past_key_values.kv.memory().values()) < 2 << 20
        rest = model(tokens[:, 40:], past_key_values=first.past_key_values).logits
        torch.testing.assert_close(rest, model(tokens).logits[:, 40:], atol=1e-5, rtol=1e-5)


def test_generation_needs_memory_for_its_text_and_not_for_the_most_tokens_that_it_may_have(exported):
    model, tokens = load(exported), torch.randint(0, 255, (1, 60))
    options = {"do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    many = model.generate(tokens, max_new_tokens=600, **options).sequences  # outgrows the first room of the cache
    with torch.no_grad():
        assert torch.equal(model(many[:, :-1]).logits[:, 59:].argmax(-1), many[:, 60:])
    few = model.generate(tokens, max_new_tokens=1 << 30, **options | {"eos_token_id": int(many[0, 65])})
    assert torch.equal(few.sequences, many[:, : few.sequences.shape[1]])
    assert sum(few.past_key_values.kv.memory().values()) < 2 << 20


def test_a_tuple_is_given_where_asked_for(exported):
    model, tokens = load(exported), torch.randint(0, 255, (1, 10))
    loss, logits = model(tokens, labels=tokens, return_dict=False)
    want = model(tokens, labels=tokens)
    assert torch.equal(loss, want.loss)
    assert torch.equal(logits, want.logits)


def test_unsupported_features_are_refused_by_name(exported):
    model = load(exported)
    tokens = torch.randint(0, 255, (1, 10))
    with pytest.raises(ArgumentError, match="beam search is not supported"):
        model.generate(tokens, num_beams=2, max_new_tokens=2)
    with pytest.raises(ArgumentError, match="must be an NSACache, got DynamicCache"):
        model(tokens, past_key_values=transformers.DynamicCache())
    with pytest.raises(ArgumentError, match="inputs_embeds"):
        model(inputs_embeds=torch.zeros(1, 3, 48))
    with pytest.raises(ArgumentError, match="prefill_chunk_size: needs padding on the left"):
        model.generate(tokens, attention_mask=(torch.arange(10) < 5).long()[None], prefill_chunk_size=4)
    with pytest.raises(ArgumentError, match="offload"):
        model.gradient_checkpointing_enable(offload=True)
    with pytest.raises(ConfigError, match="not an empty folder"):
        export_model(None, exported)


def test_an_empty_folder_is_filled_and_not_replaced(run, exported, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # as the shell of somebody who exports to "."
    monkeypatch.setattr("nsa.hf.exporter.model_card", mock.Mock(side_effect=OSError("disk full")))
    with pytest.raises(CheckpointError, match="cannot be written: disk full"):
        export_model(run, Path())
    assert not any(Path().iterdir())
    monkeypatch.setattr("nsa.hf.exporter.model_card", model_card)
    export_model(run, Path())
    assert {path.name for path in Path().iterdir()} == {path.name for path in exported.iterdir()}


def test_the_model_card_is_utf_8_in_every_locale(run, tmp_path):
    before = locale.setlocale(locale.LC_CTYPE)
    locale.setlocale(locale.LC_CTYPE, "C")
    try:
        export_model(run, tmp_path / "modèle")
    finally:
        locale.setlocale(locale.LC_CTYPE, before)
    assert "# modèle" in (tmp_path / "modèle" / "README.md").read_text(encoding="utf-8")


def test_the_cache_can_be_used_by_hand(run, exported):
    model = load(exported)
    tokens = torch.randint(0, 255, (2, 50))
    cache = NSACache(model, batch_size=2, max_length=64)
    with torch.no_grad():
        logits = [model(part, past_key_values=cache).logits for part in tokens.split([30, 1, 19], dim=1)]
        torch.testing.assert_close(torch.cat(logits, 1), run.model(tokens), atol=1e-5, rtol=1e-5)
    assert cache.get_seq_length() == 50


def test_copies_of_a_filled_cache_continue_a_common_start(exported):
    model = load(exported)
    tokens = torch.randint(0, 255, (1, 50))
    start = NSACache(model, batch_size=1, max_length=40)
    with torch.no_grad():
        model(tokens[:, :40], past_key_values=start)
    settings = {"max_new_tokens": 8, "do_sample": False}
    for end in (45, 50):
        continued = model.generate(tokens[:, :end], past_key_values=copy.deepcopy(start), **settings)
        assert torch.equal(continued, model.generate(tokens[:, :end], **settings))
    assert start.get_seq_length() == 40


@pytest.mark.parametrize("name", ["bytes", "json", "gpt2"])
def test_the_tokenizer_encodes_the_same(tmp_path, name):
    ours = tokenizer_named(name, tmp_path)
    fast_tokenizer(ours, 512).save_pretrained(tmp_path / "saved")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert isinstance(theirs, transformers.PreTrainedTokenizerFast)
    for text in [TEXT, "", " two  spaces\t\n", "naïve ÿ ß 日本語 🙂", "say <|endoftext|> aloud"]:
        ids = ours.encode(text).tolist()
        assert theirs.encode(text, add_special_tokens=False) == ids
        assert theirs.encode(text) == [ours.separator, *ids]
        assert theirs.decode(ids) == ours.decode(ids)
    assert theirs.eos_token_id == theirs.pad_token_id == ours.separator


@pytest.mark.parametrize("separator", ["<s:1>", "<|doc:0|>", "[END OF TEXT]", "$A"])
def test_any_text_may_be_the_separator(tmp_path, separator):
    tokenizer_named("json", tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace("<|endoftext|>", separator))
    fast_tokenizer(load_tokenizer(str(file), separator=separator), 512).save_pretrained(tmp_path / "saved")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    a, b = (theirs.encode(text, add_special_tokens=False) for text in ("main", "return"))
    start = theirs.convert_tokens_to_ids(separator)
    assert theirs.encode("main") == [start, *a]
    assert theirs("main", "return")["input_ids"] == [start, *a, start, *b]


def test_ignored_keys_of_a_tokenizer_file_do_not_prevent_an_export(tmp_path):
    tokenizer_named("json", tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": 5, "truncation": "x", "padding": []}))
    tokenizer = load_tokenizer(str(file))
    exported = fast_tokenizer(tokenizer, 100)
    assert exported("return", add_special_tokens=False)["input_ids"] == tokenizer.encode("return").tolist()


def test_trust_remote_code_loads_the_classes_of_this_package_and_keeps_the_code_of_the_folder(exported, tmp_path):
    (tmp_path / "load.py").write_text(
        "import sys; assert 'nsa.hf' not in sys.modules;"
        "from transformers import AutoModelForCausalLM as M;"
        f"model = M.from_pretrained({str(exported)!r}, trust_remote_code=True);"
        f"model.save_pretrained({str(tmp_path / 'again')!r}); print(type(model).__module__)"
    )
    (ended,) = wait_all([warm.start(str(tmp_path / "load.py"), env=environment())])
    assert ended.output.splitlines()[-1] == NSAForCausalLM.__module__, ended.output
    described, again = (json.loads((folder / "config.json").read_text()) for folder in (exported, tmp_path / "again"))
    assert again["auto_map"] == described["auto_map"]
    assert [file.name for file in (tmp_path / "again").glob("*.py")] == [CODE_FILE]


def test_whoever_lacks_the_package_is_not_sent_to_an_index(exported):
    assert set(get_imports(exported / CODE_FILE)) <= {"torch", "transformers", *sys.stdlib_module_names}
    card = (exported / "README.md").read_text()
    # Of the tokenizer too: transformers asks otherwise, and waits for an answer on a terminal.
    assert card.count('from_pretrained("model", trust_remote_code=True)') == 2
    assert "pip install './nsa-" in card
    assert "a package named nsa on a public index is not this one" in card


def test_the_address_of_the_package_stays_with_a_model(run, exported, tmp_path):
    address = "git+https://host.invalid/nsa.git"
    model = load(exported)
    model.config.package = address
    model.save_pretrained(tmp_path)
    model.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["package"] == address
    card = model_card(run, "name", address)
    assert f"pip install 'nsa[hf] @ {address}'" in card
    assert "index" not in card


def test_gradient_checkpointing_changes_no_gradient_and_can_be_taken_back(exported):
    model, tokens = load(exported).train(), torch.randint(0, 255, (2, 60))
    recomputed = []
    for block in model.decoder.blocks:
        block.mlp.register_forward_pre_hook(lambda *_: recomputed.append(1))

    def gradients():
        recomputed.clear()
        return torch.autograd.grad(model(tokens, labels=tokens).loss, list(model.parameters())), len(recomputed)

    plain, calls = gradients()
    assert calls == 2
    for options, want in (({}, 4), ({}, 4), ({"every_n_layers": 2}, 3)):  # enabled again, a block is not wrapped twice
        model.gradient_checkpointing_enable(**options)
        assert model.is_gradient_checkpointing
        got, calls = gradients()
        assert calls == want
        assert all(torch.equal(a, b) for a, b in zip(got, plain, strict=True))
    assert model.eval().generate(tokens, max_new_tokens=3).shape == (2, 63)
    model.train().gradient_checkpointing_disable()
    assert gradients()[1] == 2
    assert not model.is_gradient_checkpointing
    assert all(block.recompute is None for block in model.decoder.blocks)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_trainer_lowers_the_loss(tmp_path, exported, checkpointing):
    model = load(exported)
    torch.manual_seed(0)
    tokens = torch.randint(0, 255, (8, 64))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    with torch.no_grad():
        before = float(model(tokens, labels=tokens).loss)
    settings = transformers.TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=8,
        max_steps=8,
        learning_rate=3e-3,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        gradient_checkpointing=checkpointing,
    )
    trainer = transformers.Trainer(model, settings, train_dataset=data, eval_dataset=data)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before - 0.05
    assert trainer.predict(data).predictions.shape == (8, 64, 256)


def test_lora_trains_its_own_parameters_and_reaches_all(exported):
    peft = pytest.importorskip("peft")
    names = [r".*attention\.(q|out)", r".*attention\.[kv]\.[012]", r".*mlp\.(gate|up|out)"]
    pattern = "|".join(f"({name})" for name in names)
    model = peft.get_peft_model(load(exported), peft.LoraConfig(r=4, target_modules=pattern, task_type="CAUSAL_LM"))
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(trainable) == 2 * 2 * (1 + 1 + 6 + 3)
    assert all("lora_" in name for name in trainable)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW(trainable.values(), lr=1e-2)
    tokens = torch.randint(0, 255, (2, 100))
    for _ in range(2):  # the second factor of an adapter starts at 0, and the first has no gradient until it moved
        optimizer.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in trainable.values())
    assert all(torch.equal(frozen[name], p) for name, p in model.named_parameters() if not p.requires_grad)
