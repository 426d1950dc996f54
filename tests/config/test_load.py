"""Loading YAML and overrides: what is read, what wins, and what an error contains."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from nsa.cli.arguments import all_overrides
from nsa.config import Config, differences, load_config, parse_config, shipped_names
from nsa.config.load import split_overrides
from nsa.errors import ConfigError
from nsa.plain_yaml import LARGEST, dump_yaml, parse_yaml

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def load(tmp_path):
    """Loads a configuration from the text of its file."""

    def load_text(text: str, *overrides: str) -> Config:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return load_config(path, overrides)

    return load_text


@pytest.fixture
def mistakes(load):
    """The lines of the error that a configuration gives."""

    def lines(text: str, *overrides: str) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load(text, *overrides)
        return str(caught.value).splitlines()

    return lines


# What is read


@pytest.mark.parametrize("number", ["3e-4", "3E-4", "0.3e-3", "3.e-4", "+3e-4", ".0003", "0.0003"])
def test_every_way_to_write_a_learning_rate_is_a_number(load, number):
    in_file = load(f"train: {{lr: {number}}}").train.lr
    in_override = load("", f"train.lr={number}").train.lr
    assert in_file == in_override == pytest.approx(3e-4)
    assert type(in_file) is float


def test_an_integer_is_accepted_as_a_float(load):
    assert load("train: {lr: 1, weight_decay: 0}").train.lr == 1.0


def test_an_empty_file_and_an_empty_section_mean_the_defaults(load):
    assert load("") == load("train:\nmodel:\n") == Config()


def test_a_saved_configuration_loads_as_itself(load):
    config = load(
        "train: {lr: 3e-4, steps: 7}\nparallel: {ddp: {bucket_mb: 3}}\ndata: {source: text, paths: [a b.txt]}"
    )
    assert load(yaml.safe_dump(config.to_dict())) == config


def test_a_configuration_cannot_be_changed_after_loading(load):
    config = load("")
    with pytest.raises(ValidationError, match="frozen"):
        config.train.steps = 3
    with pytest.raises(ValidationError, match="frozen"):
        config.train = config.train
    assert config.train.steps == 1000


def test_reading_a_configuration_loads_neither_torch_nor_numpy():
    program = (
        "import sys\n"
        "from nsa.config import load_config\n"
        "load_config('configs/m7c_125m.yaml', ['train.seed=1'])\n"
        "print(sorted({'torch', 'triton', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_shipped_configuration_is_found_by_its_name_everywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shipped_names() == sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
    for name in shipped_names():
        assert load_config(name) == load_config(ROOT / "configs" / f"{name}.yaml")
    assert load_config("quickstart", ["train.steps=6"]).train.steps == 6


def test_a_file_beats_the_shipped_configuration_of_its_name_and_a_folder_does_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("quickstart").write_text("train: {steps: 5}")
    Path("long_64k").mkdir()
    assert load_config("quickstart").train.steps == 5
    assert load_config("long_64k").train.seq_len == 65_536


@pytest.mark.parametrize("given", ["m7c_125", "configs/m7c_125m.yaml", "m7c_125m.yaml"])
def test_a_missing_file_that_looks_like_a_shipped_name_says_the_name(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no such file; did you mean m7c_125m\?$"):
        load_config(given)


# What wins


def test_an_override_beats_the_file(load):
    assert load("train: {steps: 5}", "train.steps=6").train.steps == 6


def test_the_last_of_two_overrides_wins(load):
    assert load("train: {steps: 5}", "train.steps=6", "train.seed=1", "train.steps=7").train.steps == 7


def test_a_wrong_override_that_a_later_one_replaces_is_accepted(load):
    assert load("", "train.steps=none", "train.steps=7").train.steps == 7


def test_overrides_in_one_string_come_after_the_separate_ones():
    joined = all_overrides(["train.steps=1", "model.dim=32"], ["train.steps=2 train.seed=3", "train.seed=4"])
    config = parse_config({}, "test", joined)
    assert (config.train.steps, config.model.dim, config.train.seed) == (2, 32, 4)


def test_an_override_reaches_a_nested_section_and_leaves_its_neighbours(load):
    config = load("parallel: {strategy: single, ddp: {bucket_view: false}}", "parallel.ddp.bucket_mb=4")
    assert config.parallel.ddp.bucket_mb == 4
    assert config.parallel.ddp.bucket_view is False
    assert config.parallel.strategy == "single"


def test_an_override_reaches_a_section_the_file_does_not_have(load):
    assert load("train: {steps: 5}", "parallel.fsdp.sharding=grad_op").parallel.fsdp.sharding == "grad_op"


def test_an_override_replaces_a_whole_section(load):
    config = load("train: {steps: 5, seed: 9}", "train={steps: 6}")
    assert (config.train.steps, config.train.seed) == (6, 0)


def test_one_override_gives_all_layers_of_a_file_with_a_pattern_the_same_kind(load):
    hybrid, pattern = "model: {layer_pattern: [msa, dense]}\nmsa: {block: 64}", "model.layer_pattern=[window]"
    dense = load(hybrid, "model.attention=dense")
    assert (dense.model.layer_pattern, set(dense.model.layer_kinds()), dense.msa) == (None, {"dense"}, Config().msa)
    assert load(hybrid, "model.attention=msa").msa.block == 64
    assert load(hybrid, "model.n_layers=4").model.layer_pattern == ["msa", "dense"]
    for overrides in (["model.attention=dense", pattern], [pattern, "model.attention=dense"]):
        assert load(hybrid, *overrides).model.layer_pattern == ["window"]
    assert set(load_config("m7c_125m_hybrid", ["model.attention=nsa"]).model.layer_kinds()) == {"nsa"}
    saved = load(hybrid).to_dict()  # as in a checkpoint
    assert set(parse_config(saved, "checkpoint", ["model.attention=dense"]).model.layer_kinds()) == {"dense"}
    assert saved["model"]["layer_pattern"] == ["msa", "dense"]


def test_an_override_can_set_a_key_back_to_nothing(load):
    assert load("train: {out_dir: here}", "train.out_dir=null").train.out_dir is None


@pytest.mark.parametrize("value", ["run #1", "#1", "new\nline", '"new\nline"', " run", "run "])
def test_a_text_that_yaml_would_change_is_refused(load, value):
    with pytest.raises(ConfigError, match=r"YAML reads ('.*'|None) here; put the value in double quotes") as told:
        load("", f"train.out_dir={value}")
    assert f"override 'train.out_dir={value}'" in str(told.value)
    assert load("", f"train.out_dir={json.dumps(value)}").train.out_dir == value


@pytest.mark.parametrize("value", ["~/x", "run#1", "my run", "C:\\x", "caf\u00e9", "a'b", 'it "is"'])
def test_a_text_without_quotes_arrives_as_it_is(load, value):
    assert load("", f"train.out_dir={value}").train.out_dir == value


def test_an_override_that_is_not_utf8_says_so(load):
    with pytest.raises(ConfigError, match=r"override 'train\.out_dir=caf\\udce9': is not valid UTF-8"):
        load("", "train.out_dir=caf\udce9")


# One string of overrides


@pytest.mark.parametrize(
    ("joined", "parts"),
    [
        ("train.steps=10 model.n_layers=2", ["train.steps=10", "model.n_layers=2"]),
        ("  train.steps=10\n\tmodel.n_layers=2  ", ["train.steps=10", "model.n_layers=2"]),
        ("train.profile_steps=[1, 2] train.seed=3", ["train.profile_steps=[1, 2]", "train.seed=3"]),
        ("data.paths=[a.txt, 'b c.txt'] train.seed=3", ["data.paths=[a.txt, 'b c.txt']", "train.seed=3"]),
        (
            "data.mixture=[{source: text, paths: [a b, 'c]']}, {source: python}] train.seed=3",
            ["data.mixture=[{source: text, paths: [a b, 'c]']}, {source: python}]", "train.seed=3"],
        ),
        ("model.rope_scaling={factor: 2, original_length: 8}", ["model.rope_scaling={factor: 2, original_length: 8}"]),
        ('train.out_dir="my run" train.seed=3', ['train.out_dir="my run"', "train.seed=3"]),
        ("train.out_dir='my run'", ["train.out_dir='my run'"]),
        ("", []),
    ],
    ids=["two", "any-space", "list", "quotes-in-list", "nested", "braces", "double-quotes", "single-quotes", "empty"],
)
def test_one_string_splits_into_its_overrides(joined, parts):
    assert split_overrides(joined) == parts


def test_values_from_one_string_arrive_whole(load):
    config = load("", *split_overrides("""data.paths=[a.txt, "b c.txt"] train.out_dir='my run'"""))
    assert config.data.paths == ["a.txt", "b c.txt"]
    assert config.train.out_dir == "my run"


@pytest.mark.parametrize(
    "joined", ["data.paths=[a.txt", 'train.out_dir="my run', "train.seed=1 ]", "train.out_dir=it's"]
)
def test_an_unclosed_bracket_or_quote_is_refused(joined):
    with pytest.raises(ConfigError, match=r"--override: cannot be read.*key=value"):
        split_overrides(joined)


# What an error contains


@pytest.mark.parametrize(
    ("text", "inner", "section"),
    [("train.steps: 3", "steps", "train:"), ("parallel: {ddp.bucket_mb: 3}", "bucket_mb", "ddp:")],
)
def test_a_key_of_a_file_that_is_written_as_in_an_override_is_explained(mistakes, text, inner, section):
    [line] = mistakes(text)
    assert line.endswith(f"unknown key; in a file, write '{inner}:' inside the section '{section}'")


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("train.step=3", "train.steps"),
        ("model.n_layer=3", "model.n_layers"),
        ("parallel.ddp.bucket=3", "parallel.ddp.bucket_mb"),
        ("trian.steps=3", "train"),
        ("modle.dim=3", "model"),
        ("Model.dim=3", "model"),
        ("train.LR=3", "train.lr"),
        ("model.lr=3", "train.lr"),
        ("train.precision=bf16", "runtime.precision"),
        ("parallel.bucket_mb=3", "parallel.ddp.bucket_mb"),
        ("telemetry.eval_every=3", "train.eval_every"),
        ("seed=3", "train.seed"),
        ("fsdp.sharding=full", "parallel.fsdp"),
        ("model.rope_scaling={facto: 2.0}", "model.rope_scaling.factor"),
        ("data.mixture=[{sourc: text}]", "data.mixture.0.source"),
    ],
)
def test_an_unknown_key_gets_the_closest_valid_one(mistakes, override, suggestion):
    [line] = mistakes("", override)
    assert line.startswith(f"override '{override}': ")
    assert line.endswith(f"unknown key; did you mean '{suggestion}'?")


def test_a_key_like_no_other_gets_the_list_of_valid_ones(mistakes):
    [line] = mistakes("checkpoint: {zzz: 3}")
    assert line.endswith("checkpoint.zzz: unknown key; valid here: every, keep, background")


def test_all_mistakes_are_reported_together(mistakes):
    lines = mistakes("modle: {}\ntrain: {steps: ten, lr: -1}\nmodel: {head_dim_k: 20}", "nsa.cmp_stride=3")
    for key in ("modle", "train.steps", "train.lr", "model.head_dim_k", "nsa.cmp_stride"):
        assert len([line for line in lines if f": {key}: " in line]) == 1, key
    assert len(lines) == 5


def test_an_error_names_the_file_it_comes_from(mistakes, tmp_path):
    [line] = mistakes("train: {steps: ten}", "train.seed=3")
    assert line == f"{tmp_path / 'run.yaml'}: train.steps: must be a valid integer, got 'ten'"


@pytest.mark.parametrize(
    ("overrides", "culprit", "key"),
    [
        (["train.steps=5", "train.steps=ten"], "train.steps=ten", "train.steps"),
        (["train={steps: ten}"], "train={steps: ten}", "train.steps"),
        (["data.paths=[3]"], "data.paths=[3]", "data.paths.0"),
        (["data.mixture=[{weight: x}]"], "data.mixture=[{weight: x}]", "data.mixture.0.weight"),
        (["trian.steps=3"], "trian.steps=3", "trian"),
        (["train.lr.high=3"], "train.lr.high=3", "train.lr"),
    ],
    ids=["last-one", "whole-section", "list-entry", "inside-a-list-entry", "unknown-section", "below-a-number"],
)
def test_an_error_names_the_override_it_comes_from(mistakes, overrides, culprit, key):
    [line] = mistakes("model: {dim: 32}", *overrides)
    assert line.startswith(f"override '{culprit}': {key}: ")


@pytest.mark.parametrize("override", ["data.source=text", "data.paths=[books]", "data.text_field=body"])
def test_an_override_of_a_source_beside_a_mixture_is_refused(mistakes, load, override):
    mixture = "data: {mixture: [{source: synthetic}], paths: [unused]}"
    [line] = mistakes(mixture, override)
    assert line == f"override '{override}': has no effect with data.mixture; add data.mixture=[], or change the mixture"
    assert load(mixture, override, "data.mixture=[]").data.mixture == []


@pytest.mark.parametrize(
    ("text", "override", "key"),
    [
        ("nsa: {cmp_stride: 16}", "nsa.sel_block=40", "nsa.cmp_stride"),
        ("train: {micro_batch: 4}", "train.batch_size=6", "train.micro_batch"),
        ("model: {n_kv_heads: 2}", "model.n_heads=3", "model.n_kv_heads"),
        ("model: {rotary_dim: 64}", "model.head_dim_k=48", "model.rotary_dim"),
        ("", "model.rotary_dim=7", "model.rotary_dim"),
        ("", "data.source=text", "data.paths"),
    ],
)
def test_a_broken_rule_names_the_override_that_broke_it(mistakes, text, override, key):
    [line] = mistakes(text, override)
    assert line.startswith(f"override '{override}': {key}: ")


@pytest.mark.parametrize(
    ("text", "line_number"),
    [
        ("train:\n  steps: 3\n  seed: 1\n  steps: 4\n", 4),
        ("train: {steps: 3}\nmodel: {}\ntrain: {steps: 4}\n", 3),
        ("train: {steps: 3, steps: 3}\n", 1),
    ],
    ids=["in-a-section", "a-section", "same-value"],
)
def test_a_key_given_twice_in_the_file_is_refused(mistakes, text, line_number):
    [line] = mistakes(text)
    assert f"run.yaml, line {line_number}: " in line
    assert "is given twice; keep one of them" in line


def test_a_key_given_twice_in_an_override_is_refused(mistakes):
    [line] = mistakes("", "train={steps: 3, steps: 4}")
    assert line.startswith("override 'train={steps: 3, steps: 4}'")
    assert "'steps' is given twice" in line


@pytest.mark.parametrize(
    "value",
    [
        "!!python/object/apply:os.system ['touch {marker}']",
        "!!python/object/new:subprocess.Popen [[touch, '{marker}']]",
        "!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['{marker}']]",
        "!!python/name:os.system",
        "!!python/module:this",
        "!anything 3",
    ],
)
def test_a_tag_is_refused_and_nothing_runs(mistakes, tmp_path, value):
    marker = tmp_path / "executed"
    value = value.replace("{marker}", str(marker))
    for lines in (mistakes(f"train:\n  steps: {value}\n"), mistakes("", f"train.steps={value}")):
        assert len(lines) == 1
        assert "tags are not supported, write the plain value" in lines[0]
    assert not marker.exists()
    assert "this" not in sys.modules


@pytest.mark.parametrize("value", ["[*.txt]", "[**/*.txt]", "[*, a]", "[*bias]", "[!head.*]", "[a, !b]", "[!a, b]"])
def test_a_glob_without_quotes_gets_the_advice_to_quote_it(mistakes, value):
    for [line] in (mistakes(f"train:\n  freeze: {value}\n"), mistakes("", f"train.freeze={value}")):
        assert line.endswith("put a text that begins with *, & or ! in quotes, for example ['*.txt']")


def test_a_character_that_yaml_reserves_gets_the_advice_to_quote_it(mistakes):
    [line] = mistakes("", "data.repo=@me/books")
    assert line.endswith("cannot start any token; put the value in quotes")


@pytest.mark.parametrize(("override", "value"), [("train.out_dir=2024", 2024), ("data.revision=1e5", 1e5)])
def test_a_text_that_yaml_reads_as_a_number_gets_the_advice_to_quote_it(mistakes, load, override, value):
    [line] = mistakes("", override)
    assert line.endswith(f"must be a valid string, got {value}; put it in quotes (in an override: '\"...\"')")
    assert load("", override.replace("=", '="') + '"')


def test_an_unknown_kind_of_layer_is_named_once(mistakes):
    assert mistakes("", "model.attention=NSA") == [
        "override 'model.attention=NSA': model.attention: must be one of nsa, msa, dense, window, got 'NSA'"
    ]


def test_a_value_that_expands_to_billions_of_elements_gives_a_short_error(mistakes):
    levels = "".join(f"  - &l{i} [*l{i - 1}, *l{i - 1}]\n" for i in range(1, 40))
    [line] = mistakes(f"train:\n  steps:\n  - &l0 [x, x]\n{levels}")
    assert "run.yaml, line 4: not valid YAML: an alias (*) is not supported" in line
    assert len(line) < 500


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("model: &m {dim: 64}\ntrain: *m\n", "line 2: not valid YAML: an alias (*) is not supported; write out"),
        ("model:\n  <<: {dim: 64}\n", "line 2: not valid YAML: a merge key (<<) is not supported; write out"),
        ("model:\n  ? !!merge x\n  : {dim: 64}\n", "line 2: not valid YAML: a merge key (<<) is not supported"),
        ("#" * 300_000, "run.yaml: not valid YAML: it has"),
        ("# " + 10**7 * "x", "run.yaml: not valid YAML: it has"),
        ("model: " + "[" * 100_000, "run.yaml: not valid YAML: maximum recursion depth exceeded"),
    ],
    ids=["alias", "merge", "tagged merge", "comment", "10 MB", "deep"],
)
def test_yaml_that_could_take_forever_is_refused_at_once(mistakes, text, problem):
    began = time.monotonic()
    [line] = mistakes(text)
    assert problem in line
    assert time.monotonic() - began < 20.0, "a loose bound: it took minutes, or never ended"


@pytest.mark.parametrize(
    ("text", "value"),
    [("060", 60), ("0o17", 15), ("0x1F", 31), ("10_000", 10_000), ("+7", 7), ("6e1", 60.0), ("1.5", 1.5),
     (".inf", math.inf), ("1:30", "1:30"), ("0b11", "0b11"), ("2024-01-01", "2024-01-01"), ("yes", True), ("~", None),
     ("=", "=")],
)  # fmt: skip
def test_numbers_are_those_of_yaml_1_2(text, value):
    parsed = parse_yaml(text)
    assert (parsed, type(parsed)) == (value, type(value))


@pytest.mark.parametrize("text", ["060", "1:30", "1e5", "0o17", "0x1F", "2024-01-01", "yes", "~", "10_000", "<<", "*a"])
def test_a_text_that_looks_like_something_else_survives_being_saved(load, text):
    config = parse_config({"data": {"revision": text}}, "test")
    assert load(dump_yaml(config.to_dict())) == config
    assert yaml.safe_load(dump_yaml({"revision": text})) == {"revision": text}, "for other readers too"


@pytest.mark.parametrize(
    "text", ["é" * 200, "日本 👩‍🚀", "a\u2028b\x85 c", "\ufeffx", "\u202e", "\udcff", "\x1b", "a\n b: c"]
)
def test_every_character_survives_being_saved(text):
    for ascii_only in (False, True):
        assert parse_yaml(dump_yaml({"paths": [text]}, ascii_only=ascii_only)) == {"paths": [text]}
    assert dump_yaml("é" * 200).count("é") == 200


def test_the_saved_form_of_the_largest_configuration_loads(tmp_path):
    source = tmp_path / "run.yaml"
    source.write_text("data: {source: text, paths: [" + ",".join(["é" * 80] * 3_200) + "]}", encoding="utf-8")
    config = load_config(source)
    saved = tmp_path / "config.yaml"
    saved.write_text(dump_yaml(config.to_dict()), encoding="utf-8")
    assert len(saved.read_text(encoding="utf-8")) > LARGEST
    assert load_config(saved, in_run=True) == config
    with pytest.raises(ConfigError, match="more than the 262,144"):
        load_config(saved)


@pytest.mark.parametrize("value", ["!!bool foo", "!!timestamp foo", "!!null [a]"])
def test_a_value_that_does_not_fit_its_tag_is_a_mistake(mistakes, value):
    [line] = mistakes(f"train: {{steps: {value}}}")
    assert "run.yaml" in line
    assert "not valid YAML" in line


def test_a_section_that_is_set_or_unset_differs_from_what_a_run_was_started_with():
    scaled = parse_config({"model": {"rope_scaling": {"factor": 4.0}}}, "test")
    written = parse_config({}, "test").to_dict()  # which says rope_scaling: null
    assert parse_config(written, "test", ["model.rope_scaling.factor=4"]) == scaled
    assert differences(scaled.to_dict(), scaled) == []
    assert differences(scaled.to_dict(), Config()) == ["model.rope_scaling: unknown then, None now"]
    assert "model.rope_scaling.factor: unknown then, 4.0 now" in differences(Config().to_dict(), scaled)


def test_configurations_of_earlier_versions_still_load(load):
    config = parse_config({"data": {"revision": "060"}, "train": {"lr": 1e-5, "steps": 60}}, "test")
    assert load(yaml.safe_dump(config.to_dict(), sort_keys=False)) == config


def test_a_configuration_may_be_a_link_and_one_in_a_run_folder_may_not(tmp_path):
    (tmp_path / "real.yaml").write_text("train: {steps: 5}")
    (tmp_path / "config.yaml").symlink_to("real.yaml")
    assert load_config(tmp_path / "config.yaml").train.steps == 5
    with pytest.raises(ConfigError, match=r"config\.yaml: cannot be read: it is a symbolic link"):
        load_config(tmp_path / "config.yaml", in_run=True)


def test_an_empty_pipe_is_no_configuration():
    """The command that writes it failed, or another reader has emptied it."""
    reader, writer = os.pipe()
    os.close(writer)
    try:
        with pytest.raises(ConfigError, match=rf"/dev/fd/{reader}: the pipe is empty; check the command"):
            load_config(f"/dev/fd/{reader}")
    finally:
        os.close(reader)


@pytest.mark.parametrize(
    "override",
    [
        *("train.seq_len=9223372036854775808", "model.dim=4611686018427387904", "nsa.window=100000000000000000000000"),
        *("parallel.timeout_s=1e300", "runtime.threads=99999999999", "parallel.ddp.bucket_mb=100000000000000000000"),
        *("train.batch_size=10000000000", "model.n_layers=1000000000", "model.mlp_dim=4611686018427387904"),
        *("train.steps=9223372036854775808", "data.workers=1000000", "data.prefetch=9223372036854775808"),
    ],
)
def test_a_size_that_no_machine_has_is_named(mistakes, override):
    key, _, value = override.partition("=")
    [line] = mistakes("", override)
    assert f"{key}: must be" in line
    assert value[:3] in line


def test_a_tree_that_is_not_a_mapping_is_refused():
    with pytest.raises(ConfigError, match="somewhere: must hold sections such as 'model:'"):
        parse_config(["model"], "somewhere")
