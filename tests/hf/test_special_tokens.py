"""Where a text begins and ends: the tokens of an imported model survive training and another export."""

import json
import shutil
from contextlib import closing

import pytest
import torch

from nsa import generate_tokens, load_run
from nsa.config import load_config
from nsa.data.chat import ChatTokenizer
from nsa.data.sequences import COUNTED
from nsa.hf.exporter import export_model
from nsa.hf.importer import import_model
from nsa.train import train
from tests.hf.runs import make_run
from tests.hf.test_importer import make

transformers = pytest.importorskip("transformers")
PROMPT = list(range(20, 40))
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %} {{ m.content }}{% if m.role == 'assistant' %} {{ eos_token }}{% endif %}"
    "{% endfor %}"
)
TINY = ["train.steps=1", "train.seq_len=64", "train.batch_size=1", "data.source=synthetic", "runtime.precision=fp32"]
TINY += ["runtime.device=cpu", "telemetry.tensorboard=false", "train.eval_sequences=1"]


def write_tokenizer(folder, specials, **options):
    """A word for every id of a vocabulary of 256; `specials` names some of them."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({specials.get(i, f"t{i}"): i for i in range(256)}, unk_token="t255"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in specials.values()])
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **options).save_pretrained(folder)


def greedy(folder, length):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = model.generate(torch.tensor([[1, *PROMPT]]), max_new_tokens=length, do_sample=False)
    return tokens[0, 1 + len(PROMPT) :].tolist()


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A Llama that ends its text with the fifth token, and begins texts with token 1."""
    folder = tmp_path_factory.mktemp("llama")
    model = make(folder, bos_token_id=None, eos_token_id=None)
    drawn = greedy(folder, 5)
    assert drawn[4] not in drawn[:4]
    model.config.bos_token_id, model.config.eos_token_id = 1, 2
    model.generation_config.eos_token_id = [2, drawn[4]]
    model.save_pretrained(folder)
    special = {1: "<s>", 2: "</s>", drawn[4]: "<|eot|>"}
    write_tokenizer(folder, special, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE)
    assert greedy(folder, 9) == drawn
    return folder, drawn


def test_an_imported_model_ends_where_it_ended_and_so_does_its_export(tmp_path, llama):
    folder, drawn = llama
    config = import_model(folder, tmp_path / "run")
    assert (config.data.separator, config.data.end_tokens) == ("<s>", ["</s>", "<|eot|>"])
    run = load_run(tmp_path / "run")
    prompt = " ".join(f"t{i}" for i in PROMPT)
    pieces = list(generate_tokens(run, [prompt], max_tokens=9, temperature=0.0))
    assert [piece.token for piece in pieces] == [*drawn[:4], None]
    assert pieces[-1].end == "stop"
    export_model(run, tmp_path / "hf")
    assert greedy(tmp_path / "hf", 9) == drawn
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert tokenizer(prompt)["input_ids"] == [1, *PROMPT]
    for name in ("config.json", "generation_config.json"):
        described = json.loads((tmp_path / "hf" / name).read_text())
        assert described["eos_token_id"] == [2, drawn[4], 1]  # documents of training here end with the separator
        assert described["bos_token_id"] == 1
    again = import_model(tmp_path / "hf", tmp_path / "again")
    assert again.data.model_copy(update={"tokenizer": config.data.tokenizer}) == config.data


def test_training_on_conversations_keeps_the_ends_and_the_template(tmp_path, llama):
    import_model(llama[0], tmp_path / "run", attention="nsa")
    question, answer = {"role": "user", "content": "t20 t21 </s>"}, {"role": "assistant", "content": "t22 t23"}
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": [question, answer]}) + "\n") * 16)
    settings = [f"train.init_from={tmp_path / 'run'}", "data.source=chat", f"data.paths=[{tmp_path / 'chats.jsonl'}]"]
    config = load_config(tmp_path / "run" / "config.yaml", [*TINY, *settings, "data.validation_fraction=0"])
    train(config, tmp_path / "trained")
    shutil.rmtree(tmp_path / "run")
    for source in (tmp_path / "trained", tmp_path / "trained" / "model.safetensors"):
        assert load_run(source).tokenizer.ends == (2, llama[1][4], 1)
    run = load_run(tmp_path / "trained")
    export_model(run, tmp_path / "hf")
    with closing(run.chat_tokenizer()) as chat:
        prompt = chat.prompt([question | {"content": "t20 t21"}, answer, question])
    # The text </s> in the last message stays text, whose letters are not in this vocabulary.
    assert prompt == [1, 20, 21, 22, 23, 2, 20, 21, *[255] * len("</s>")]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.chat_template == run.chat_template == TEMPLATE
    assert tokenizer.apply_chat_template([question, answer])["input_ids"] == [1, 20, 21, 2, 22, 23, 2]
    import_model(tmp_path / "hf", tmp_path / "again")
    assert load_run(tmp_path / "again").chat_template == TEMPLATE
    # The same tokens count as in transformers, which finds them by the tags of a template.
    tagged = TEMPLATE.replace("{{ eos_token }}", "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %} t7")
    messages = [{"role": role, "content": f"t{n} t{n + 1}"} for n, role in ((30, "user"), (40, "assistant"))] * 2
    theirs = tokenizer.apply_chat_template(messages, chat_template=tagged, return_assistant_tokens_mask=True)
    with closing(ChatTokenizer(run.tokenizer, tagged)) as chat:
        [document] = chat.encode_documents([chat.renderer.render({"messages": messages})])
    assert (document % COUNTED).tolist() == theirs["input_ids"]
    assert (document // COUNTED).tolist() == theirs["assistant_masks"]
    assert sum(theirs["assistant_masks"]) == 6


@pytest.mark.parametrize(
    ("changes", "options", "separator", "end_tokens"),
    [
        ({"bos_token_id": 7, "eos_token_id": 8}, {"eos_token": "<|im_end|>"}, "<|endoftext|>", ["<|im_end|>"]),
        ({"bos_token_id": None, "eos_token_id": 8}, {}, "<|im_end|>", []),
        ({"bos_token_id": None, "eos_token_id": None}, {"eos_token": "<|im_end|>"}, "<|im_end|>", []),
        ({"bos_token_id": 300, "eos_token_id": [9, 300]}, {}, None, []),
    ],
)
def test_which_tokens_a_folder_names(tmp_path, changes, options, separator, end_tokens):
    make(tmp_path / "hf", **changes)
    (tmp_path / "hf" / "generation_config.json").unlink()
    write_tokenizer(tmp_path / "hf", {7: "<|endoftext|>", 8: "<|im_end|>"}, **options)
    data = import_model(tmp_path / "hf", tmp_path / "run").data
    assert (data.separator, data.end_tokens) == (separator, end_tokens)


def test_tokens_that_were_added_to_an_export_are_imported_again(tmp_path):
    export_model(make_run(tmp_path / "run", "mean"), tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|start|>", "<|end|>"]})
    tokenizer.eos_token, tokenizer.split_special_tokens = "<|end|>", False
    tokenizer.chat_template = "{% for m in messages %}<|start|>{{ m.content }}<|end|>{% endfor %}"
    model.resize_token_embeddings(len(tokenizer))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(tmp_path / "tuned")
    tokenizer.save_pretrained(tmp_path / "tuned")
    assert import_model(tmp_path / "tuned", tmp_path / "again").data.end_tokens == ["<|end|>"]
    run = load_run(tmp_path / "again")
    assert run.tokenizer.ends == (257, 255)
    assert run.tokenizer.encode("hi").tolist() == [*b"hi"]
    with closing(run.chat_tokenizer()) as chat:
        assert chat.prompt([{"role": "user", "content": "hi"}]) == [256, *b"hi", 257]


def test_built_in_tokenizers_have_no_other_ends(tmp_path):
    from nsa.data.tokenizers import load_tokenizer
    from nsa.errors import ConfigError

    with pytest.raises(ConfigError, match=r"data\.end_tokens: bytes has a fixed separator"):
        load_tokenizer("bytes", end_tokens=["x"])
    write_tokenizer(tmp_path, {7: "</s>"})
    with pytest.raises(ConfigError, match=r"data\.end_tokens: 'x' is not a token"):
        load_tokenizer(str(tmp_path), end_tokens=["x"])
