"""Fine-tunes an exported model with transformers.Trainer, with PEFT and with TRL: tiny, on a CPU.

python examples/finetune.py
"""

import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorWithFlattening, Trainer, TrainingArguments

import nsa
from nsa.config import load_config
from nsa.hf.exporter import export_model
from nsa.train import train

NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
SETTINGS = {"max_steps": 8, "per_device_train_batch_size": 4, "learning_rate": 5e-3, "use_cpu": True, "bf16": False}
SETTINGS |= {"logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True}


def export_a_model(folder: Path) -> Path:
    """Does what `nsa train` and `nsa export` do from a shell."""
    sizes = ["model.n_layers=2", "model.dim=64", "train.seq_len=128", "train.steps=1", "telemetry.tensorboard=false"]
    train(load_config("quickstart", ["data.source=recall", "data.document_tokens=64", *sizes]), folder / "run")
    export_model(nsa.load_run(folder / "run"), folder / "hf")
    return folder / "hf"


def examples(model: Path) -> list[dict[str, list[int]]]:
    """Returns tokens: the tokenizer adds the separator before a text, and the end token is added here."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [" ".join(NUMBERS[start:]) for start in range(8)] * 4
    return [{"input_ids": [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]} for text in texts]


def report(name: str, trainer: Trainer) -> None:
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    print(f"{name}: loss {float(losses[0]):.3f} -> {float(losses[-1]):.3f}")


def with_trainer(model: Path, out: Path) -> None:
    """The collator packs the examples of a batch into one row, without padding; each attends to itself only."""
    trainer = Trainer(
        AutoModelForCausalLM.from_pretrained(model),
        TrainingArguments(str(out), **SETTINGS),
        train_dataset=examples(model),
        data_collator=DataCollatorWithFlattening(),
    )
    trainer.train()
    report("transformers.Trainer", trainer)


def with_peft(model: Path, out: Path) -> None:
    """Only the adapters are trained and saved. k.0 to k.2 are the keys of the branches cmp, sel and win."""
    from peft import LoraConfig, PeftModel, get_peft_model

    layers = r".*attention\.(q|out|k\.[012]|v\.[012])"
    config = LoraConfig(r=8, target_modules=layers, task_type="CAUSAL_LM")
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    settings = TrainingArguments(str(out), **SETTINGS)
    collator = DataCollatorWithFlattening()
    trainer = Trainer(adapted, settings, train_dataset=examples(model), data_collator=collator)
    trainer.train()
    report("PEFT", trainer)
    adapted.save_pretrained(out)
    merged = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), out).merge_and_unload()
    merged.save_pretrained(out / "merged")  # a model as before, which `nsa import` reads too


def with_trl(model: Path, out: Path) -> None:
    """packing=True fills rows of max_length tokens with whole examples."""
    if find_spec("trl") is None:
        print("TRL: not installed (pip install trl)")
        return
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(model),
        SFTConfig(str(out), packing=True, max_length=128, **SETTINGS),
        train_dataset=Dataset.from_list(examples(model)),  # tokens: the text of an end token is not the end token
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.train()
    report("TRL", trainer)


def main() -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        model = export_a_model(Path(folder))
        for tune in (with_trainer, with_peft, with_trl):
            tune(model, Path(folder) / tune.__name__)


if __name__ == "__main__":
    main()
