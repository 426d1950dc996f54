"""Conversations: the template renders them, only the assistant's tokens are targets, and no template does harm."""

import gzip
import json
import time
from contextlib import closing
from functools import partial
from itertools import groupby
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers as hf
import torch
from tokenizers import decoders, models, pre_tokenizers

from nsa.config.architecture import Architecture, ModelConfig, NSAConfig
from nsa.config.schema import DataConfig, TrainConfig
from nsa.data.build import build_data
from nsa.data.chat import BUILT_IN_TEMPLATE, ChatTokenizer, chat_template_of
from nsa.data.sequences import COUNTED, IGNORED
from nsa.data.sources.base import Skipped
from nsa.data.sources.chat import ChatSource, Renderer
from nsa.data.statistics import of_source
from nsa.data.tokenizers import ByteTokenizer, byte_letters, load_tokenizer
from nsa.errors import ArgumentError, DataError
from nsa.nn.loss import next_token_loss
from nsa.nn.model import build_model

BYTES = ByteTokenizer()
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + '</s>' }}{% endif %}{% endfor %}"
)
TAGGED = (
    "{%- for m in messages %}\n{{- m.role + ': ' }}\n{%- if m.role == 'assistant' %}\n"
    "{%- generation %}{{ m.content }}{% endgeneration %}\n{%- else %}\n{{- m.content }}\n{%- endif %}\n"
    "{{- ';' + loop.last | string }}\n{%- endfor %}"
)
# Without what earlier answers say before </think>: the beginnings of a conversation change as it goes on.
FORGETS = CHATML.replace("m['content'] +", "(m['content'] if loop.last else m['content'].split('</think>')[-1]) +")


def talk(*texts, system=None):
    """A user and the assistant in turn."""
    roles = ("user", "assistant")
    said = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    return {"messages": [*([{"role": "system", "content": system}] if system else []), *said]}


def special_tokenizer(folder, merges=()):
    """Byte-level BPE with a token for every byte, those of `merges` and four special tokens."""
    letters = byte_letters()
    vocabulary = {token: number for number, token in enumerate([*letters, *(a + b for a, b in merges)])}
    backend = hf.Tokenizer(models.BPE(vocabulary, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>", "<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    return load_tokenizer(str(folder), separator="<s>", end_tokens=["</s>"])


@pytest.fixture(scope="module")
def chat_with(tmp_path_factory):
    """A template with a tokenizer that has special tokens, or another; every process is started once."""
    opened, folder = {}, tmp_path_factory.mktemp("tokenizer")

    def make(template, tokenizer=None):
        if (template, tokenizer) not in opened:
            opened[template, tokenizer] = ChatTokenizer(tokenizer or special_tokenizer(folder), template)
        return opened[template, tokenizer]

    yield make
    for chat in opened.values():
        chat.close()


def shown(chat, document):
    """Every token by its name, those that count inside of [ ], with * around a special token."""
    names = dict(enumerate(map(chr, range(255)))) | {255: "*</s>*"}
    if chat.inner is not BYTES:
        vocabulary = hf.Tokenizer.from_str(chat.inner.to_str()).get_vocab()
        plain = {letter: chr(byte) for byte, letter in enumerate(byte_letters())}
        names = {i: "".join(plain[c] for c in token) for token, i in vocabulary.items() if not token.endswith(">")}
        names |= {i: plain.get(token, f"*{token}*") for token, i in vocabulary.items() if token.endswith(">")}
    runs = groupby(document.tolist(), key=lambda token: token >= COUNTED)
    texts = ((counts, "".join(names[token % COUNTED] for token in tokens)) for counts, tokens in runs)
    return "".join(f"[{text}]" if counts else text for counts, text in texts)


def encoded(chat, conversation):
    [document] = chat.encode_documents([chat.renderer.render(conversation)])
    return document


TOOLS = {
    "tools": [{"name": "add"}],
    "messages": [
        {"role": "user", "content": "1+2"},
        {"role": "assistant", "content": None, "tool_calls": [{"add": [1, 2]}]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "three"},
    ],
}
MASKS = {
    "one turn": (None, talk("hi", "yo"), "*</s>*<|user|>\nhi\n<|assistant|>\n[yo*</s>*]"),
    "system": (None, talk("hi", "yo", system="be"), "*</s>*<|system|>\nbe\n<|user|>\nhi\n<|assistant|>\n[yo*</s>*]"),
    "several turns": (
        None,
        talk("a", "b", "c", "d"),
        "*</s>*<|user|>\na\n<|assistant|>\n[b*</s>*]<|user|>\nc\n<|assistant|>\n[d*</s>*]",
    ),
    "empty content": (None, talk("", ""), "*</s>*<|user|>\n\n<|assistant|>\n[*</s>*]"),
    "tools": (
        None,
        TOOLS,
        '*</s>*<|tools|>\n[{"name": "add"}]\n<|user|>\n1+2\n<|assistant|>\n[<|tool_calls|>\n[{"add": [1, 2]}]*</s>*]'
        "<|tool|>\n3\n<|assistant|>\n[three*</s>*]",
    ),
    "ends with a question": (None, talk("a", "b", "c"), "*</s>*<|user|>\na\n<|assistant|>\n[b*</s>*]<|user|>\nc\n"),
    "special tokens": (
        CHATML,
        talk("hi", "yo"),
        "*<|im_start|>*user\nhi*<|im_end|>*\n*<|im_start|>*assistant\n[yo*<|im_end|>*\n]",
    ),
    "special tokens in a message stay text": (
        CHATML,
        talk("<|im_end|>", "</s>!"),
        "*<|im_start|>*user\n<|im_end|>*<|im_end|>*\n*<|im_start|>*assistant\n[</s>!*<|im_end|>*\n]",
    ),
    "no prompt for an answer": (
        INST,
        talk("a", "b", "c", "d"),
        "*<s>*[INST] a [/INST][ b*</s>*][INST] c [/INST][ d*</s>*]",
    ),
    "tags": (TAGGED, talk("a", "b", "c", "d"), "user: a;Falseassistant: [b];Falseuser: c;Falseassistant: [d];True"),
}


@pytest.mark.parametrize(("template", "conversation", "expected"), MASKS.values(), ids=MASKS)
def test_only_the_tokens_of_the_assistant_count(chat_with, template, conversation, expected):
    chat = chat_with(template or BUILT_IN_TEMPLATE, None if template else BYTES)
    assert shown(chat, encoded(chat, conversation)) == expected
    *_, last = conversation["messages"]
    if last["role"] == "assistant" and template is not TAGGED:
        # What a model sees before its answer in training is what it sees in generation.
        whole = [token % COUNTED for token in encoded(chat, conversation).tolist()]
        prompt = chat.prompt(conversation["messages"][:-1], conversation.get("tools"))
        assert whole[: len(prompt)] == prompt
        assert (encoded(chat, conversation)[len(prompt) :] >= COUNTED).all()


def test_a_token_that_begins_before_the_answer_and_ends_in_it_counts(chat_with, tmp_path):
    chat = chat_with(CHATML, special_tokenizer(tmp_path, merges=[("Ċ", "y")]))
    assert shown(chat, encoded(chat, talk("hi", "yo"))).endswith("assistant[\nyo*<|im_end|>*\n]")


def write(path, conversations):
    path.write_text("".join(json.dumps(conversation) + "\n" for conversation in conversations), encoding="utf-8")
    return str(path)


def data_of(path, packing="best_fit", seq_len=64, fraction=0.0, **options):
    data = DataConfig(source="chat", paths=[path], packing=packing, validation_fraction=fraction, **options)
    return build_data(data, TrainConfig(seq_len=seq_len, eval_sequences=2), BYTES)


@pytest.mark.parametrize(
    ("packing", "expected"),
    [
        # 26 tokens before the answer of 30, then a border after 40: the last target of a sequence is the first token of
        # the next one, and the separator that follows the conversation is not a target.
        ("best_fit", ["-" * 25 + "a" * 15, "a" * 15 + "e" + "-" * 24]),
        ("concat", ["-" * 25 + "a" * 15]),
    ],
)
def test_a_conversation_that_is_cut_at_the_context_keeps_its_targets(tmp_path, packing, expected):
    path = write(tmp_path / "a.jsonl", [talk("q", "a" * 30)])
    sequences = data_of(path, packing, seq_len=40).train.sequences
    rows = [sequences.row(number) for number in range(sequences.count)]
    letters = {IGNORED: "-", ord("a"): "a", BYTES.separator: "e"}
    found = ["".join(letters[target] for target in row.targets.tolist()) for row in rows]
    assert sorted(found) == sorted(expected)
    assert max(int(row.inputs.max()) for row in rows) <= BYTES.separator
    assert sequences.num_targets(range(len(rows))) == sum(len(text.replace("-", "")) for text in expected)


def test_a_mixture_masks_the_targets_of_its_conversations_alone(tmp_path):
    path = write(tmp_path / "a.jsonl", [talk("q", "answer")] * 9)
    parts = [{"source": "chat", "paths": [path]}, {"source": "synthetic"}]
    data = build_data(DataConfig(mixture=parts, validation_fraction=0), TrainConfig(seq_len=32), BYTES)
    sequences = data.train.sequences
    shares = [int((sequences.row(n).targets != IGNORED).sum()) for n in range(20)]
    assert max(shares) == 32
    assert 0 < min(shares) < 16
    assert sequences.num_targets(range(20)) == sum(shares)


@torch.no_grad()
def test_the_loss_of_packed_conversations_equals_a_loop_over_each_by_hand(tmp_path):
    said = [talk("ab", "cd"), talk("e", "fgh", "i", "j"), talk("longer question", "x"), talk("k", "")]
    data = data_of(write(tmp_path / "a.jsonl", said), seq_len=100)
    model = build_model(
        Architecture(
            model=ModelConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim_k=16, head_dim_v=16),
            nsa=NSAConfig(cmp_block=8, cmp_stride=4, sel_block=8, num_selected=4, window=8),
        ),
        BYTES.vocab_size,
        seed=1,
    )
    batch = data.train.batch(0, data.train.sequences.count)
    loss_of = partial(next_token_loss, targets_BS=batch.targets)
    total = float(model(batch.inputs, batch.cu_seqlens, batch.max_seqlen, loss=loss_of))
    by_hand, answers = 0.0, 0
    for conversation in said:
        tokens = [255]
        counted = []
        for message in conversation["messages"]:
            tokens += f"<|{message['role']}|>\n".encode()
            is_answer = message["role"] == "assistant"
            content = [*message["content"].encode(), 255 if is_answer else 10]
            counted += range(len(tokens), len(tokens) + len(content)) if is_answer else ()
            tokens += content
        logits = model.head(model.hidden(torch.tensor([tokens])))[0]
        for place in counted:
            by_hand -= float(torch.log_softmax(logits[place - 1], -1)[tokens[place]])
            answers += 1
    assert data.train.sequences.num_targets(range(data.train.sequences.count)) == answers
    assert int((batch.targets != IGNORED).sum()) == answers
    assert total == pytest.approx(by_hand, rel=1e-5)


HOSTILE = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a power": "{{ 10 ** (10 ** 9) }}",
    "a long text": "{{ messages[0].content * 10 ** 11 }}",
    "a text that doubles": "{% set n = namespace(x='a') %}{% for _ in range(99) %}{% set n.x = n.x * 2 %}{% endfor %}",
    "a long result": "{{ 'x' * 40000000 }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a module": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "a change": "{{ messages.append(1) }}",
}


@pytest.mark.parametrize("template", HOSTILE.values(), ids=HOSTILE)
def test_a_template_that_loops_allocates_or_reaches_for_attributes_is_refused_in_bounded_time(template):
    began = time.monotonic()
    refused = pytest.raises((ValueError, DataError), match=r"the chat template (fails|needs more than|needs probably)")
    with refused, closing(Renderer(template, {}, cpu_s=0.2)) as renderer:
        renderer.render(talk("a", "b"))
    assert time.monotonic() - began < 60  # a busy machine; without a limit most of them never end


def test_only_the_conversation_that_exceeds_a_limit_is_refused():
    slow = "{% if messages[0].content == 'slow' %}" + HOSTILE["nested loops"] + "{% endif %}"
    with closing(Renderer(slow + BUILT_IN_TEMPLATE, {"bos_token": "", "eos_token": ""}, cpu_s=0.2)) as renderer:
        good = renderer.render(talk("a", "b"))
        for _ in range(2):
            with pytest.raises(ValueError, match=r"needs more than 0\.2 s of CPU time"):
                renderer.render(talk("slow", "b"))
            assert renderer.render(talk("a", "b")) == good
    with pytest.raises(ValueError, match="the chat template needs"):
        renderer.render(talk("a", "b"))


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ('{"messages": [', "line 1: not valid JSON"),
        ('{"text": "a"}', "line 1: has no list 'messages'"),
        ('{"messages": []}', "line 1: has no list 'messages'"),
        ('{"messages": [{"role": "gpt", "content": "a"}]}', "line 1: message 1 has the role 'gpt'"),
        ('{"messages": [{"role": "user", "content": ["a"]}]}', "line 1: message 1 must have a text as 'content'"),
        ('{"messages": [{"role": "user"}]}', "line 1: message 1 must have a text as 'content', got NoneType"),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": 1}', "line 1: 'tools' must be a list"),
        (f"{json.dumps(talk('a', 'b'))}\n[]", "line 2: has no list 'messages'"),
    ],
)
def test_a_line_that_is_no_conversation_is_refused_with_its_place(tmp_path, lines, problem):
    (tmp_path / "a.jsonl").write_text(lines)
    source = ChatSource([str(tmp_path / "a.jsonl")], SimpleNamespace(render=lambda _: "rendered"))
    with pytest.raises(DataError) as refused:
        list(source.documents(source.units()[0], Skipped()))
    assert f"a.jsonl, {problem}" in str(refused.value)


def test_a_template_that_hides_where_answers_are_is_refused_unless_it_has_tags(tmp_path):
    path = write(tmp_path / "a.jsonl", [talk("a", "<think>x</think>b", "c", "d")])
    (tmp_path / "t.jinja").write_text(FORGETS)
    with pytest.raises(DataError, match=r"a.jsonl, line 1: .*message 2 in another way.*\{% generation %\}"):
        data_of(path, chat_template=str(tmp_path / "t.jinja"))
    (tmp_path / "t.jinja").write_text(TAGGED)
    assert data_of(path, chat_template=str(tmp_path / "t.jinja"), seq_len=40).train.sequences.count == 2


def test_conversations_without_an_answer_are_skipped_and_other_files_refused(tmp_path):
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(conversation) + "\n" for conversation in [talk("a"), talk("a" * 99, "b")])
    data = data_of(str(tmp_path / "a.jsonl.gz"))
    assert "1 training document," in data.summary
    assert "skipped 1 (no message of the assistant)" in data.summary
    assert "1 conversations are longer than a sequence" in data.summary
    for name in ("a.txt", "a.jsonl.txt"):
        (tmp_path / name).write_text("text")
        with pytest.raises(DataError, match=rf"{name}: conversations are read from \.jsonl files"):
            data_of(str(tmp_path / name))
    assert "2 training documents" in data_of(write(tmp_path / "B.JSONL", [talk("a" * 50, "b"), talk("c")] * 2)).summary


def test_validation_needs_an_answer(tmp_path):
    """The longest conversation: its first sequences are a question."""
    path = write(tmp_path / "a.jsonl", [talk("q" * 2000, f"a{n}") for n in range(12)])
    data = data_of(path, "concat", seq_len=16, fraction=0.3)
    with pytest.raises(DataError, match=r"first 2 validation sequences contain no answer.*train.eval_sequences"):
        _ = data.validation.sequences


def test_statistics_count_the_tokens_of_rendered_conversations(tmp_path):
    path = write(tmp_path / "a.jsonl", [talk("hi", "yo"), talk("more", "text")])
    found = of_source(DataConfig(source="chat", paths=[path]), samples=1, limit=1)
    assert found.about == "chat: 1 file, the first 1 document"
    assert found.lengths.tolist() == [len("s<|user|>\nhi\n<|assistant|>\nyos")]
    assert found.samples == ["<|user|>\nhi\n<|assistant|>\nyo"]


@pytest.mark.parametrize("form", ["file", "text", "list"])
def test_the_template_of_a_tokenizer_is_found_where_transformers_writes_it(tmp_path, form):
    special_tokenizer(tmp_path)
    data = DataConfig(source="chat", paths=["x"], tokenizer=str(tmp_path / "tokenizer.json"))
    assert chat_template_of(data) == BUILT_IN_TEMPLATE
    assert chat_template_of(data.model_copy(update={"source": "python"})) is None
    named = [{"name": "tools", "template": "other"}, {"name": "default", "template": CHATML}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named if form == "list" else CHATML}))
    if form == "file":
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "older"}))
        (tmp_path / "chat_template.jinja").write_text(CHATML)
    assert chat_template_of(data) == CHATML
    (tmp_path / "own.jinja").write_text(INST)
    assert chat_template_of(data.model_copy(update={"chat_template": str(tmp_path / "own.jinja")})) == INST


@pytest.mark.parametrize("content", [{"chat_template": 5}, {"chat_template": [{"name": "rag", "template": "x"}]}])
def test_a_template_that_cannot_be_used_is_refused(tmp_path, content):
    special_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    data = DataConfig(source="chat", paths=["x"], tokenizer=str(tmp_path))
    with pytest.raises(DataError, match=r"tokenizer_config\.json: has no chat_template with the name 'default'"):
        chat_template_of(data)
    assert chat_template_of(data.model_copy(update={"source": "python"})) is None
    with pytest.raises(DataError, match=r"none\.jinja: cannot be read: No such file"):
        chat_template_of(data.model_copy(update={"chat_template": str(tmp_path / "none.jinja")}))


def test_a_prompt_that_the_template_refuses_is_an_argument_error(chat_with):
    chat = chat_with("{{ raise_exception('users first') }}", BYTES)
    with pytest.raises(ArgumentError, match="messages: the chat template fails: users first"):
        chat.prompt([{"role": "user", "content": "a"}])


def test_order_and_sequences_of_conversations_are_those_of_any_corpus(tmp_path):
    """Every answer is a target once in an epoch, in every epoch in another order."""
    path = write(tmp_path / "a.jsonl", [talk("q", f"{n:03d}") for n in range(40)])
    sequences = data_of(path, seq_len=128).train.sequences
    epochs = []
    for epoch in range(2):
        rows = [sequences.row(epoch * sequences.count + number) for number in range(sequences.count)]
        targets = np.concatenate([row.targets[row.targets != IGNORED] for row in rows])
        epochs.append(BYTES.decode(targets.tolist()))
    answers = [sorted(text[n : n + 3] for n in range(0, len(text), 3)) for text in epochs]
    assert answers == [[f"{n:03d}" for n in range(40)]] * 2
    assert epochs[0] != epochs[1]
