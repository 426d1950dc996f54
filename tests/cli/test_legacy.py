"""The arguments of the old scripts, translated to overrides and a folder."""

from pathlib import Path

import pytest

from nsa.cli import legacy_commands
from nsa.config import load_config
from nsa.config.load import ConfigWarning
from nsa.errors import ConfigError

CONFIGS = legacy_commands.ROOT / "configs"
M7C = CONFIGS / "m7c_125m.yaml"
TWO_GPUS = CONFIGS / "m7c_125m_2xa100_production.yaml"
OLD_VARIABLES = {"NSA_DDP_STATIC_GRAPH": "1", "NSA_DDP_FIND_UNUSED": "0", "NSA_DDP_BUCKET_MB": "25"}


def resolved(file: Path, *overrides: str, **environment: str) -> list[str]:
    return legacy_commands.resolve_overrides(file, list(overrides), environment, one_source=None)


def folder_of(overrides: list[str]) -> str:
    return overrides[-1].removeprefix("train.out_dir=")


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def test_config_is_found_here_first_and_then_in_the_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert legacy_commands.find_config({}) == M7C
    assert legacy_commands.find_config({"CONFIG": ""}) == M7C
    assert legacy_commands.find_config({"CONFIG": "configs/quickstart.yaml"}) == CONFIGS / "quickstart.yaml"
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "quickstart.yaml").touch()
    assert legacy_commands.find_config({"CONFIG": "configs/quickstart.yaml"}) == Path("configs/quickstart.yaml")
    assert legacy_commands.find_config({"CONFIG": str(TWO_GPUS)}) == TWO_GPUS
    assert legacy_commands.find_config({"CONFIG": "quickstart"}) == Path("quickstart"), "as for every other command"


def test_old_arguments_are_overrides():
    assert legacy_commands.shorthands("synthetic", 10, "bf16", None, fsdp=False) == [
        "data.source=synthetic",
        "train.steps=10",
        "runtime.precision=bf16",
    ]
    assert legacy_commands.shorthands(None, None, None, 1, fsdp=False) == ["parallel.strategy=ddp"]
    assert legacy_commands.shorthands(None, None, None, 0, fsdp=True) == ["parallel.strategy=fsdp"]
    assert "parallel.allow_single_rank=true" in legacy_commands.shorthands(None, None, None, 0, fsdp=False)


def test_on_a_gpu_a_production_file_runs_as_it_is_in_the_folder_of_nsa_train(gpu, recwarn):
    assert resolved(TWO_GPUS) == ["train.out_dir=runs/m7c_125m_2xa100_production"]
    assert resolved(TWO_GPUS, "data.source=fineweb_edu") == [
        "data.source=fineweb_edu",
        "train.out_dir=runs/m7c_125m_2xa100_production",
    ]
    assert not recwarn.list


def test_a_folder_name_lists_the_keys_that_differ_from_the_file(gpu):
    names = [
        folder_of(resolved(M7C, *overrides, **environment))
        for overrides, environment in [
            (["data.source=synthetic", "train.steps=10"], {}),
            (["train.steps=10", "data.source=synthetic"], {}),
            (["data.source=synthetic", "train.steps=10"], {"NSA_FORCE_BRANCH": "cmp"}),
            (["data.source=text", "data.paths=[a b/c.txt]"], {}),
        ]
    ]
    assert names == [
        "runs/m7c_125m,source=synthetic,steps=10",
        "runs/m7c_125m,source=synthetic,steps=10",
        "runs/m7c_125m,force_branch=cmp,source=synthetic,steps=10",
        "runs/m7c_125m,source=text,paths=_a_b_c.txt_",
    ]
    assert resolved(M7C, "train.out_dir=here") == ["train.out_dir=here"]


def test_a_key_of_a_section_that_the_file_leaves_out_is_in_the_folder_name(gpu):
    assert folder_of(resolved(M7C, "model.rope_scaling.factor=4")).startswith("runs/m7c_125m,factor=4.0,")


def test_a_long_folder_name_is_shortened_and_stays_unique(gpu):
    many = [f"data.paths=[{'x' * 300}]", "data.source=text"]
    names = {folder_of(resolved(M7C, *many, f"train.seed={seed}")) for seed in range(5)}
    assert len(names) == 5
    assert max(map(len, names)) < 150


def test_without_a_gpu_the_125m_model_fits_host_memory_and_logs_every_step(no_gpu):
    with pytest.warns(ConfigWarning, match=r"trains on the CPU.*runtime\.device=cpu"):
        overrides = resolved(TWO_GPUS)
    config = load_config(TWO_GPUS, overrides)
    assert config.runtime.device == "cpu"
    assert (config.train.micro_batch, config.train.log_every, config.train.eval_sequences) == (1, 1, 8)
    assert folder_of(overrides) == "runs/m7c_125m_2xa100_production,cpu"


def test_a_static_graph_keeps_its_one_pass_on_a_cpu_too(no_gpu):
    with pytest.warns(ConfigWarning, match="gradient_checkpointing=block"):
        overrides = resolved(M7C, **OLD_VARIABLES)
    config = load_config(M7C, overrides, OLD_VARIABLES)
    assert config.parallel.ddp.static_graph
    assert (config.train.micro_batch, config.runtime.gradient_checkpointing) == ("auto", "block")


def test_small_files_and_explicit_keys_stay_unchanged_on_a_cpu(no_gpu, recwarn):
    quick = CONFIGS / "quickstart.yaml"
    assert resolved(quick) == ["train.out_dir=runs/quickstart"]
    assert not recwarn.list
    asked = ["train.micro_batch=4", "train.log_every=7", "runtime.device=cuda"]
    config = load_config(TWO_GPUS, resolved(TWO_GPUS, *asked))
    assert (config.train.micro_batch, config.train.log_every) == (4, 7)
    assert config.runtime.device == "cuda", "refused by nsa train"


def test_the_production_file_wins_over_old_variables_with_a_warning(gpu):
    overrides = resolved(TWO_GPUS, **OLD_VARIABLES)
    with pytest.warns(ConfigWarning, match=r"static_graph is set to False explicitly, which wins") as caught:
        config = load_config(TWO_GPUS, overrides, OLD_VARIABLES)
    assert len(caught) == 1, "the others say what the file says"
    assert not config.parallel.ddp.static_graph


def test_a_mixture_is_not_silently_read_instead_of_the_dataset(tmp_path, gpu):
    file = tmp_path / "mixed.yaml"
    file.write_text("data: {mixture: [{source: python}, {source: synthetic}]}")
    with pytest.raises(ConfigError, match=r"data\.mixture=\[\]"):
        legacy_commands.resolve_overrides(file, ["data.source=synthetic"], {}, one_source="synthetic")
    alone = ["data.source=synthetic", "data.mixture=[]"]
    assert legacy_commands.resolve_overrides(file, alone, {}, one_source="synthetic")[:2] == alone


def test_a_file_that_is_valid_only_with_its_overrides_gives_the_folder_its_name(tmp_path, gpu):
    file = tmp_path / "mine.yaml"
    file.write_text("data: {source: text}")
    assert folder_of(resolved(file, "data.paths=[notes.txt]")) == "runs/mine"
