"""The configuration of a run, section by section. Sections are frozen and reject unknown keys and wrong types.

Every field has a description. Validators also check rules between fields, so that a run can start with every
configuration that loads.
"""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from nsa.config.architecture import Architecture, MSAConfig
from nsa.config.fields import (
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Probability,
    Seconds,
    Section,
    Text,
    field_error,
)

LONGEST_SEQUENCE = 2**27  # tokens
_PATHS = {  # what a source needs in data.paths
    "text": "a file, folder or glob, for example data.paths=[notes.txt]",
    "chat": ".jsonl files, for example data.paths=[chats.jsonl]",
    "prepared": "a folder that `nsa data prepare` wrote",
    "megatron": "the files or folders of a corpus",
    "datatrove": "the files or folders of a corpus",
}


class SourceConfig(Section):
    """A source of documents."""

    source: Literal[
        "synthetic", "recall", "python", "text", "fineweb_edu", "hub", "prepared", "megatron", "datatrove", "chat"
    ] = Field("python", description="kind of source")
    paths: list[Text] = Field(
        [],
        description="text, chat: files, folders or globs; prepared: folders that `nsa data prepare` wrote; "
        "megatron: .idx files of .bin and .idx pairs, their folders, or the paths of pairs without .bin and .idx; "
        "datatrove: .ds files or their folders; "
        "fineweb_edu, hub: a local mirror to read instead of the hub",
    )
    text_field: Text = Field(
        "text", description="field of a .jsonl line or column of a .parquet file that contains the text"
    )
    repo: Text | None = Field(None, description="hub: a dataset repository of the Hugging Face hub, as OWNER/NAME")
    subset: Text = Field(
        "sample-10BT",
        description="fineweb_edu: sample-10BT, sample-100BT, sample-350BT, a crawl, or default for all; "
        "hub: a subset (configuration) of the repository; the default subset when unset",
    )
    split: Text = Field("train", description="hub: split of the subset")
    revision: Text = Field("main", description="fineweb_edu, hub: branch, tag or commit")
    document_tokens: int | None = Field(
        None, ge=16, description="recall: maximum tokens of a document; train.seq_len when unset"
    )
    task: Literal["pairs", "tracking", "counting"] = Field(
        "pairs",
        description="recall: repeated pairs of a key and a value, chains of assignments, or the most frequent of words",
    )

    @model_validator(mode="before")
    @classmethod
    def _set_default_subset(cls, values: Any) -> Any:
        """Sets the hub's name for the default subset of a repository; the default of the field is for FineWeb-Edu."""
        is_hub = isinstance(values, dict) and values.get("source") == "hub"
        return {"subset": "default", **values} if is_hub else values

    @model_validator(mode="after")
    def _check_paths(self) -> Self:
        if self.source in _PATHS and not self.paths:
            raise field_error("paths", f"the {self.source} source needs {_PATHS[self.source]}")
        if self.source == "hub" and not self.repo and not self.paths:
            raise field_error("repo", "the hub source needs a repository, for example data.repo=wikimedia/wikipedia")
        if self.repo and not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", self.repo):
            raise field_error("repo", f"write it as OWNER/NAME, for example wikimedia/wikipedia; got {self.repo!r}")
        return self


class MixturePart(SourceConfig):
    """One source of a mixture."""

    weight: PositiveFloat = Field(1.0, description="share of the sequences, relative to the other weights")


class DataConfig(SourceConfig):
    """The training data: sources, tokenizer, packing and loading."""

    mixture: list[MixturePart] = Field([], description="several sources with weights; replaces source")
    tokenizer: Text = Field("bytes", description="bytes, gpt2, or the path of a tokenizer.json")
    tokenizer_path: Text | None = Field(
        None, description="gpt2: folder with vocab.bpe; the file is downloaded and checked when unset"
    )
    separator: Text | None = Field(
        None, description="token of a tokenizer.json that precedes every document; found by name when unset"
    )
    end_tokens: list[Text] = Field(
        [], description="tokens of a tokenizer.json, besides the separator, that end generation"
    )
    chat_template: Text | None = Field(
        None,
        description="Jinja file that renders conversations; the tokenizer's own template when unset, or else a "
        "built-in one",
    )
    isolate_documents: bool = Field(True, description="tokens attend only to tokens of their own document")
    packing: Literal["concat", "best_fit"] = Field(
        "concat",
        description="concat: concatenate documents and split them at sequence ends; best_fit: pad whole documents",
    )
    validation_fraction: Probability = Field(0.02, description="share of documents held out for validation; 0 for none")
    workers: int = Field(
        2, ge=0, le=1024, description="threads per rank that read, tokenize and pack in advance; 0 for none"
    )
    prefetch: Positive = Field(4, description="batches that a rank prefetches")
    first_batch_s: Seconds = Field(60.0, description="timeout of the first batch of a source")
    stall_s: Seconds = Field(10.0, description="a longer wait for a batch is reported as a stall")
    timeout_s: Seconds = Field(
        300.0, description="how long requests to a source that does not answer are retried before the run ends"
    )


class TrainConfig(Section):
    """Optimization, logging and validation."""

    steps: Positive = Field(1000, description="optimizer steps of the whole run")
    seq_len: int = Field(2048, ge=2, le=LONGEST_SEQUENCE, description="tokens in one sequence")
    batch_size: int = Field(16, ge=1, le=2**20, description="sequences in one optimizer step, over all ranks")
    micro_batch: Positive | Literal["auto"] = Field("auto", description="sequences in one forward pass of a rank")
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw", description="muon: Muon for the matrices inside the blocks, AdamW for the rest"
    )
    lr: PositiveFloat = Field(2e-4, description="maximum learning rate")
    min_lr_ratio: float = Field(0.1, ge=0.0, le=1.0, description="final learning rate divided by lr")
    warmup_steps: NonNegative = Field(0, description="steps of linear warm-up")
    schedule: Literal["cosine", "wsd", "constant"] = Field("cosine", description="decay of the rate after warm-up")
    decay_fraction: float = Field(
        0.2, gt=0.0, le=1.0, description="wsd: share of the steps, at the end, in which the rate decays"
    )
    weight_decay: NonNegativeFloat = Field(0.01, description="weight decay of matrices")
    beta1: Probability = Field(0.9, description="beta1 of AdamW")
    beta2: Probability = Field(0.95, description="beta2 of AdamW")
    grad_clip: NonNegativeFloat = Field(
        1.0, description="maximum global gradient norm, that of MSA's index apart; 0 for no clipping"
    )
    seed: int = Field(0, ge=0, lt=2**63, description="seed of weights, data order and sampling")
    log_every: Positive = Field(10, description="steps between log lines")
    non_finite: Literal["stop", "skip"] = Field(
        "stop", description="end the run at a NaN or an infinity, or skip the step"
    )
    max_skips: Positive = Field(10, description="skipped steps after which the run ends")
    eval_every: NonNegative = Field(500, description="steps between validations; 0: only at the end")
    eval_sequences: Positive = Field(64, description="validation sequences, the same in every validation")
    out_dir: Text | None = Field(None, description="folder of the run; runs/NAME OF THE FILE when unset")
    init_from: Text | None = Field(
        None,
        description="run folder, checkpoint or .safetensors file to load the initial weights from; sparse attention "
        "layers may start from dense ones",
    )
    freeze: list[Text] = Field(
        [],
        description="name patterns of parameters to freeze, such as 'embedding.*'; a pattern after '!' unfreezes; the "
        "last pattern that matches a name decides",
    )
    teacher: Text | None = Field(
        None,
        description="run folder, checkpoint or .safetensors file of a teacher model; the run minimizes the KL "
        "divergence from its next-token distribution",
    )
    profile_steps: Annotated[list[Positive], Field(min_length=2, max_length=2)] | None = Field(
        None, description="first and last step to profile, counted from 1"
    )

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.micro_batch != "auto" and self.batch_size % self.micro_batch:
            raise field_error(
                "micro_batch", f"must divide batch_size; {self.micro_batch} does not divide {self.batch_size}"
            )
        if self.profile_steps and self.profile_steps[0] > self.profile_steps[1]:
            raise field_error("profile_steps", "the first step must not come after the last")
        return self


def _recomputation_of_a_switch(value: Any) -> Any:
    """Accepts the `true` and `false` of an earlier system."""
    return ("block" if value else "none") if isinstance(value, bool) else value


Recomputation = Annotated[Literal["none", "selective", "block", "branch"], BeforeValidator(_recomputation_of_a_switch)]
# With context parallelism, blocks are compiled in two parts, which torch's selective checkpointing does not support.
COMPILED_IN_PARTS: tuple[Recomputation, ...] = ("none", "block")
KernelChoice = Literal["auto", "triton", "reference"]


class KernelsConfig(Section):
    """The backend of each operator: auto uses the fastest that can run; any other value requires that backend."""

    phi: KernelChoice = Field("auto", description="compression")
    cmp: KernelChoice = Field("auto", description="compressed attention")
    select: KernelChoice = Field("auto", description="block selection")
    sel: KernelChoice = Field("auto", description="selected attention")
    win: KernelChoice = Field("auto", description="window attention")
    mix: KernelChoice = Field("auto", description="gated mix")
    index: KernelChoice = Field("auto", description="choice of blocks in MSA")
    index_loss: KernelChoice = Field("auto", description="index loss of MSA")

    def chosen(self) -> dict[str, str]:
        """Returns the operators whose backend is not auto."""
        return {name: choice for name, choice in self.model_dump().items() if choice != "auto"}


class RuntimeConfig(Section):
    """Device, precision, compilation and kernels."""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: a GPU if there is one")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto",
        description="auto: bf16 on a GPU, fp32 on a CPU; bf16 on a CPU without bf16 instructions is computed in fp32",
    )
    float8: Literal["none", "tensorwise", "rowwise"] = Field(
        "none",
        description="multiply in 8-bit floating point in the linear layers of blocks, with one scale per tensor or per "
        "row; needs the extra float8 and compute capability 8.9 or 9.0, and gains speed only with compile",
    )
    gradient_checkpointing: Recomputation = Field(
        "none",
        description="what backward recomputes; selective: all but the outputs of the attention kernels; block: whole "
        "blocks; branch: attention branches and MLPs one by one; true and false mean block and none",
    )
    compile: bool = Field(False, description="apply torch.compile to each block and to the loss")
    cuda_graphs: bool | Literal["auto"] = Field(
        "auto",
        description="replay forward and backward as CUDA graphs; auto: if possible, on one GPU; the log says why not",
    )
    deterministic: bool = Field(False, description="use only algorithms that give the same bits every time")
    tf32: bool = Field(True, description="use TF32 for fp32 matrix products on GPUs that support it")
    kernels: KernelsConfig = KernelsConfig()
    threads: int | None = Field(
        None, ge=1, le=4096, description="CPU threads; OMP_NUM_THREADS or the number of physical cores when unset"
    )


class DDPConfig(Section):
    """Options of DistributedDataParallel."""

    static_graph: bool = Field(False, description="assume that the same parameters have gradients in every step")
    find_unused: bool = Field(False, description="search for parameters without gradients in every step")
    bucket_mb: int = Field(25, ge=1, le=2**20, description="size of a gradient bucket in MiB")
    bucket_view: bool = Field(True, description="make gradients views of the buckets")
    broadcast_buffers: bool = Field(False, description="broadcast rank 0's buffers before each forward")
    safe_mode: bool = Field(False, description="conservative values for all options above, and reference kernels")


class FSDPConfig(Section):
    """Options of FSDP2, fully_shard."""

    blocks_per_unit: Positive = Field(1, description="decoder blocks in one FSDP unit")
    sharding: Literal["full", "grad_op"] = Field(
        "full", description="full: reshard parameters after forward; grad_op: keep them until backward"
    )
    forward_prefetch: bool = Field(True, description="gather the next unit while the current one runs")
    param_dtype: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto", description="dtype of gathered parameters; auto: the dtype of runtime.precision"
    )
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="dtype of gradient reduction")


class ParallelConfig(Section):
    """Distributed training."""

    strategy: Literal["auto", "single", "ddp", "fsdp"] = Field(
        "auto", description="auto: single for one rank, ddp for several"
    )
    context: Positive = Field(1, description="ranks that share each sequence; the others divide the batch")
    timeout_s: Seconds = Field(600.0, description="timeout of a collective")
    allow_single_rank: bool = Field(False, description="allow one process on a node with several GPUs")
    ddp: DDPConfig = DDPConfig()
    fsdp: FSDPConfig = FSDPConfig()


class CheckpointConfig(Section):
    """How often checkpoints are saved, and how many are kept."""

    every: NonNegative = Field(500, description="steps between checkpoints; 0: only at the end")
    keep: int = Field(3, ge=2, description="newest checkpoints to keep, besides the best")
    background: bool = Field(True, description="write while training continues; false: wait for every save")


class TelemetryConfig(Section):
    """What a run records."""

    every: Positive = Field(50, description="steps between samples of gate and selection statistics")
    attention: bool = Field(True, description="sample gate and selection statistics")
    mem_dump_every: NonNegative = Field(0, description="steps between memory dumps; 0: only at boot and step 1")
    per_rank: bool = Field(False, description="write the CSV files of every rank, not only of rank 0")
    tensorboard: bool = Field(True, description="write TensorBoard files")
    tracker: Literal["none", "wandb", "trackio"] = Field("none", description="send curves to a tracker, if installed")
    trace_grads: bool = Field(False, description="record when every gradient arrives, with digests; slow")
    trace_modules: bool = Field(False, description="record the order of modules in backward; slow")
    trace_buckets: bool = Field(False, description="record DDP's gradient buckets; slow")
    watchdog_floor_s: Seconds = Field(60.0, description="minimum time without progress that counts as a hang")
    watchdog_first_step_s: Seconds = Field(600.0, description="the same limit for the first step")


class ReadinessConfig(Section):
    """The criteria of `nsa ready`."""

    max_mem_gib: PositiveFloat = Field(40.0, description="maximum memory of one GPU in GiB")
    min_toks_per_s: NonNegativeFloat = Field(0.0, description="minimum tokens per second over all ranks")
    max_step_s: PositiveFloat | None = Field(None, description="maximum of the median step time in seconds")
    min_gpu_util: float = Field(80.0, ge=0.0, le=100.0, description="minimum GPU utilisation in percent")
    phase_limit_s: Seconds = Field(3600.0, description="time limit of each run of a phase")


class Config(Architecture):
    """A whole run."""

    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    readiness: ReadinessConfig = ReadinessConfig()

    @model_validator(mode="after")
    def _can_run_together(self) -> Self:
        if self.msa != MSAConfig() and "msa" not in (self.model.layer_pattern or [self.model.attention]):
            defaults = MSAConfig()
            given = [name for name in MSAConfig.model_fields if getattr(self.msa, name) != getattr(defaults, name)]
            unused = f"{', '.join(given)} would have no effect, because no layer is of the kind msa"
            raise field_error("msa", f"{unused}; set model.attention=msa, or remove the section msa")
        if self.msa.warmup_steps > self.train.steps:
            problem = f"{self.msa.warmup_steps} is more than the {self.train.steps} of train.steps"
            raise field_error("msa.warmup_steps", f"{problem}; lower it, or raise train.steps")
        ranks, length = self.parallel.context, self.train.seq_len
        if self.runtime.float8 != "none" and self.runtime.precision in ("fp32", "fp16"):
            raise field_error("runtime.float8", f"needs bf16; runtime.precision is {self.runtime.precision}")
        if self.runtime.float8 != "none" and length % (16 * ranks):
            problem = f"{length} is not a multiple of {16 * ranks}, which the matrix products need"
            raise field_error("train.seq_len", f"{problem} with runtime.float8={self.runtime.float8}")
        if ranks > 1 and self.parallel.strategy == "single":
            raise field_error(
                "parallel.context", "ranks cannot share a sequence under strategy single; use ddp or fsdp"
            )
        if ranks > 1 and length < 2 * ranks:
            cannot = f"{length} tokens cannot be divided into the {2 * ranks} chunks of {ranks} ranks"
            raise field_error("parallel.context", f"{cannot}; raise train.seq_len or lower parallel.context")
        kept = self.runtime.gradient_checkpointing
        if ranks > 1 and self.runtime.compile and kept not in COMPILED_IN_PARTS:
            cannot = f"{kept} does not work with runtime.compile where ranks share sequences"
            raise field_error("runtime.gradient_checkpointing", f"{cannot}; use none or block, or do not compile")
        return self

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump(mode="json")
