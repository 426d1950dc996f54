"""The configuration of a run, section by section. Frozen; unknown keys and wrong types are rejected.

Every field has a description. Rules between fields are checked here too, so that a
configuration that loads can be started.
"""

import re
from dataclasses import fields
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from nsa.errors import SpecError
from nsa.kinds import KINDS
from nsa.ops.spec import NSASpec

HeadSize = Annotated[int, Field(ge=16, le=256, multiple_of=16)]
LARGEST = 2**31 - 1  # of a count; no machine has more
Positive = Annotated[int, Field(ge=1, le=LARGEST)]
NonNegative = Annotated[int, Field(ge=0, le=LARGEST)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]
Text = Annotated[str, Field(min_length=1)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
Seconds = Annotated[float, Field(gt=0.0, le=2e6)]  # 23 days: the longest wait that the operating system counts


def field_error(field: str, message: str) -> PydanticCustomError:
    """An error of a section that is reported under one of its fields."""
    return PydanticCustomError("rule", "{message}", {"field": field, "message": message})


def _known_kind(kind: str) -> str:
    if kind not in KINDS:
        raise PydanticCustomError("kind", "{message}", {"message": f"must be one of {', '.join(KINDS)}, got {kind!r}"})
    return kind


LayerKind = Annotated[str, AfterValidator(_known_kind)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class RopeScalingConfig(Section):
    """Lower rotary frequencies, as `nsa.nn.rope.RopeScaling` defines them."""

    factor: float = Field(1.0, ge=1.0, description="what frequencies are divided by")
    original_length: Positive | None = Field(
        None, description="context the model was first trained with: high frequencies stay (Llama 3.1); all when unset"
    )
    low_freq_factor: PositiveFloat = Field(1.0, description="turns in it below which one is divided")
    high_freq_factor: PositiveFloat = Field(4.0, description="turns in it above which one stays")

    @model_validator(mode="after")
    def _check_factors(self) -> Self:
        if self.high_freq_factor <= self.low_freq_factor:
            raise field_error("high_freq_factor", f"must be above low_freq_factor, {self.low_freq_factor:g}")
        return self


class ModelConfig(Section):
    """The Llama-style decoder."""

    dim: int = Field(768, ge=1, le=2**20, description="width of the residual stream")
    n_layers: int = Field(12, ge=1, le=10_000, description="decoder blocks")
    n_heads: int = Field(12, ge=1, le=2**16, description="query heads")
    n_kv_heads: Positive = Field(2, description="key/value heads; divides n_heads")
    head_dim_k: HeadSize = Field(64, description="size of a query or key head; even, for rotary pairs")
    head_dim_v: HeadSize = Field(64, description="size of a value head")
    mlp_dim: int | None = Field(
        None, ge=1, le=2**22, description="width of the SwiGLU MLP; 8/3 * dim in steps of 64 when unset"
    )
    attention: LayerKind = Field("nsa", description="kind of attention layers: nsa, dense or window")
    layer_pattern: Annotated[list[LayerKind], Field(min_length=1)] | None = Field(
        None,
        description="kinds of attention layers (nsa, dense, window), repeated over the layers, for example "
        "[dense, nsa, nsa, nsa]; every layer is `attention` when unset",
    )
    qk_norm: bool = Field(False, description="RMSNorm on the queries and keys of every head, before rotary positions")
    tied_head: bool = Field(False, description="the output head shares the embedding's weight")
    rope_base: float = Field(10_000.0, gt=1.0, description="base of the rotary frequencies")
    rope_scaling: RopeScalingConfig | None = Field(None, description="lower rotary frequencies for a longer context")
    qkv_bias: bool = Field(False, description="biases in the projections of queries, keys and values")
    norm_eps: PositiveFloat = Field(1e-5, description="added inside RMSNorm")
    vocab_size: Positive | None = Field(
        None, description="taken from the tokenizer when unset; more leaves rows that no token uses"
    )

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.n_heads % self.n_kv_heads:
            raise field_error("n_kv_heads", f"must divide n_heads; {self.n_kv_heads} does not divide {self.n_heads}")
        return self

    def layer_kinds(self) -> list[str]:
        """The kind of attention of every layer."""
        pattern = self.layer_pattern or [self.attention]
        return [pattern[layer % len(pattern)] for layer in range(self.n_layers)]

    def resolved_mlp_dim(self) -> int:
        return self.mlp_dim or -(-(8 * self.dim // 3) // 64) * 64


class NSAConfig(Section):
    """Native Sparse Attention: the sizes of NSASpec, and how the layer is built."""

    cmp_block: int = Field(32, description="tokens summarised by one compressed token")
    cmp_stride: int = Field(16, description="distance between starts of neighbouring compressed blocks")
    sel_block: int = Field(64, description="tokens in one selection block")
    num_selected: int = Field(16, description="blocks each query reads, forced ones included")
    num_init: int = Field(1, description="first blocks, always read")
    num_local: int = Field(2, description="newest blocks up to the query's own, always read")
    window: int = Field(512, description="tokens of the sliding window, the query's own included")
    phi: Literal["mean", "mlp", "mean_mlp"] = Field(
        "mean", description="how a block becomes one compressed token; mean_mlp: their sum, the MLP starting at zero"
    )
    compress: Literal["before_rotation", "after_rotation"] = Field(
        "before_rotation", description="whether keys are compressed before or after rotary positions turn them"
    )
    gate: Literal["sigmoid", "softmax"] = Field("sigmoid", description="how branches are weighted")
    shared_kv: bool = Field(False, description="one key/value pair for all three branches")
    force_branch: Literal["cmp", "sel", "win"] | None = Field(None, description="train one branch alone")

    @model_validator(mode="after")
    def _check_spec(self) -> Self:
        try:
            self.spec()
        except SpecError as error:
            raise field_error(error.field, error.rule) from None
        return self

    def spec(self) -> NSASpec:
        return NSASpec(**{size.name: getattr(self, size.name) for size in fields(NSASpec)})


class SourceConfig(Section):
    """Where documents come from."""

    source: Literal["synthetic", "recall", "python", "text", "fineweb_edu", "hub", "prepared"] = Field(
        "python", description="where text comes from"
    )
    paths: list[Text] = Field(
        [],
        description="text: files, folders or globs; prepared: folders of `nsa data prepare`; "
        "fineweb_edu, hub: a local mirror instead of the hub",
    )
    text_field: Text = Field(
        "text", description="field of a .jsonl line or column of a .parquet file that holds the text"
    )
    repo: Text | None = Field(None, description="hub: a dataset repository of the Hugging Face hub, as OWNER/NAME")
    subset: Text = Field(
        "sample-10BT",
        description="fineweb_edu: sample-10BT, sample-100BT, sample-350BT, a crawl, or default for all; "
        "hub: a subset (configuration) of the repository, its default one when unset",
    )
    split: Text = Field("train", description="hub: split of the subset")
    revision: Text = Field("main", description="fineweb_edu, hub: branch, tag or commit")
    document_tokens: int | None = Field(
        None, ge=16, description="recall: tokens of the longest documents; train.seq_len when unset"
    )

    @model_validator(mode="before")
    @classmethod
    def _set_default_subset(cls, values: Any) -> Any:
        """For any repository the name that the hub gives it; the field's own default is FineWeb-Edu's."""
        is_hub = isinstance(values, dict) and values.get("source") == "hub"
        return {"subset": "default", **values} if is_hub else values

    @model_validator(mode="after")
    def _check_paths(self) -> Self:
        if self.source == "text" and not self.paths:
            raise field_error(
                "paths", "the text source needs a file, folder or glob, for example data.paths=[notes.txt]"
            )
        if self.source == "prepared" and not self.paths:
            raise field_error("paths", "the prepared source needs a folder that `nsa data prepare` wrote")
        if self.source == "hub" and not self.repo and not self.paths:
            raise field_error("repo", "the hub source needs a repository, for example data.repo=wikimedia/wikipedia")
        if self.repo and not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", self.repo):
            raise field_error("repo", f"write it as OWNER/NAME, for example wikimedia/wikipedia; got {self.repo!r}")
        return self


class MixturePart(SourceConfig):
    """One source of a mixture."""

    weight: PositiveFloat = Field(1.0, description="share of the sequences, relative to the others'")


class DataConfig(SourceConfig):
    """What is read, and how it becomes tokens."""

    mixture: list[MixturePart] = Field([], description="several sources with weights, instead of source")
    tokenizer: Text = Field("bytes", description="bytes, gpt2, or the path of a tokenizer.json")
    tokenizer_path: Text | None = Field(
        None, description="gpt2: folder with vocab.bpe; downloaded and checked when unset"
    )
    separator: Text | None = Field(
        None, description="token of a tokenizer.json that stands before every document; found by name when unset"
    )
    end_tokens: list[Text] = Field(
        [], description="tokens of a tokenizer.json that end a generated text, besides the separator"
    )
    isolate_documents: bool = Field(True, description="attention never crosses a document boundary")
    packing: Literal["concat", "best_fit"] = Field(
        "concat",
        description="concat: concatenated documents, split at sequence ends; best_fit: whole documents, with padding",
    )
    validation_fraction: Probability = Field(0.02, description="share of documents kept for validation; 0 for none")
    workers: int = Field(
        2, ge=0, le=1024, description="threads of a rank that read, tokenize and pack ahead; 0 for none"
    )
    prefetch: Positive = Field(4, description="batches that a rank prefetches")
    first_batch_s: Seconds = Field(60.0, description="timeout of the first batch of a source")
    stall_s: Seconds = Field(10.0, description="wait for a batch that is reported as a stall")
    timeout_s: Seconds = Field(
        300.0, description="how long a source that does not answer is retried before the run ends"
    )


class TrainConfig(Section):
    """Optimization, logging and validation."""

    steps: Positive = Field(1000, description="optimizer steps of the whole run")
    seq_len: int = Field(2048, ge=2, le=2**27, description="tokens in one sequence")
    batch_size: int = Field(16, ge=1, le=2**20, description="sequences in one optimizer step, over all ranks")
    micro_batch: Positive | Literal["auto"] = Field("auto", description="sequences one rank runs at once")
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw", description="muon: Muon for the matrices inside the blocks, AdamW for the rest; not with fsdp"
    )
    lr: PositiveFloat = Field(2e-4, description="highest learning rate")
    min_lr_ratio: float = Field(0.1, ge=0.0, le=1.0, description="last learning rate over the highest")
    warmup_steps: NonNegative = Field(0, description="steps of linear warm-up")
    schedule: Literal["cosine", "wsd", "constant"] = Field("cosine", description="how the rate falls after warm-up")
    decay_fraction: float = Field(
        0.2, gt=0.0, le=1.0, description="wsd: last share of the steps, in which the rate falls"
    )
    weight_decay: NonNegativeFloat = Field(0.01, description="AdamW decay of matrices")
    beta1: Probability = Field(0.9, description="AdamW")
    beta2: Probability = Field(0.95, description="AdamW")
    grad_clip: NonNegativeFloat = Field(1.0, description="largest global gradient norm; 0 for no clipping")
    seed: int = Field(0, ge=0, lt=2**63, description="of weights, data order and sampling")
    log_every: Positive = Field(10, description="steps between step lines")
    non_finite: Literal["stop", "skip"] = Field(
        "stop", description="at a NaN or an infinity: end the run, or skip the step"
    )
    max_skips: Positive = Field(10, description="skipped steps after which the run ends")
    eval_every: NonNegative = Field(500, description="steps between validations; 0 for none before the end")
    eval_sequences: Positive = Field(64, description="validation sequences, always the same")
    out_dir: Text | None = Field(None, description="folder of the run; runs/NAME OF THE FILE when unset")
    init_from: Text | None = Field(
        None, description="run folder, checkpoint or .safetensors file whose weights to start from"
    )
    freeze: list[Text] = Field(
        [],
        description="parameters that do not learn: patterns such as 'embedding.*' on their names; '!' before one takes "
        "it back, the last that matches decides",
    )
    teacher: Text | None = Field(
        None,
        description="run folder, checkpoint or .safetensors file of a model whose distribution over the next token is "
        "learned instead of the tokens (KL divergence)",
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
    """`true` and `false`, as an earlier system wrote them."""
    return ("block" if value else "none") if isinstance(value, bool) else value


Recomputation = Annotated[Literal["none", "selective", "block", "branch"], BeforeValidator(_recomputation_of_a_switch)]
# Where ranks share sequences, blocks are compiled in two parts, which torch's selective checkpointing does not allow.
COMPILED_IN_PARTS: tuple[Recomputation, ...] = ("none", "block")
KernelChoice = Literal["auto", "triton", "reference"]


class KernelsConfig(Section):
    """Who computes each operator: auto takes the fastest that can run, a name insists on that one."""

    phi: KernelChoice = Field("auto", description="compression")
    cmp: KernelChoice = Field("auto", description="compressed attention")
    select: KernelChoice = Field("auto", description="choice of blocks")
    sel: KernelChoice = Field("auto", description="selected attention")
    win: KernelChoice = Field("auto", description="window attention")
    mix: KernelChoice = Field("auto", description="gated mix")

    def chosen(self) -> dict[str, str]:
        """The operators that do not choose for themselves."""
        return {name: choice for name, choice in self.model_dump().items() if choice != "auto"}


class RuntimeConfig(Section):
    """How the machine is used."""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes a GPU where there is one")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto",
        description="auto: bf16 on a GPU, fp32 on a CPU; bf16 on a CPU without bf16 instructions is computed in fp32",
    )
    gradient_checkpointing: Recomputation = Field(
        "none",
        description="what is recomputed in backward: all but what the attention kernels gave, whole blocks, or "
        "attention branches and MLPs one by one; true and false mean block and none",
    )
    compile: bool = Field(False, description="torch.compile each block")
    cuda_graphs: bool | Literal["auto"] = Field(
        "auto",
        description="replay forward and backward as CUDA graphs; auto: where a run on one GPU can, with the reason in "
        "the log where it cannot",
    )
    deterministic: bool = Field(False, description="only algorithms that give the same bits every time")
    tf32: bool = Field(True, description="TF32 in fp32 matrix products on GPUs that have it")
    kernels: KernelsConfig = KernelsConfig()
    threads: int | None = Field(
        None, ge=1, le=4096, description="CPU threads; OMP_NUM_THREADS or the physical cores when unset"
    )


class DDPConfig(Section):
    """Options of DistributedDataParallel."""

    static_graph: bool = Field(False, description="the same parameters have gradients in every step")
    find_unused: bool = Field(False, description="look for parameters without gradients every step")
    bucket_mb: int = Field(25, ge=1, le=2**20, description="size of a gradient bucket")
    bucket_view: bool = Field(True, description="gradients are views of the buckets")
    broadcast_buffers: bool = Field(False, description="broadcast rank 0's buffers before each forward")
    safe_mode: bool = Field(False, description="the conservative set of all of these, with reference kernels")


class FSDPConfig(Section):
    """Options of FSDP2, fully_shard."""

    blocks_per_unit: Positive = Field(1, description="decoder blocks wrapped together")
    sharding: Literal["full", "grad_op"] = Field(
        "full", description="full frees parameters after forward, grad_op keeps them"
    )
    forward_prefetch: bool = Field(True, description="gather the next unit while this one runs")
    param_dtype: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto", description="type of gathered parameters; auto follows runtime.precision"
    )
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="type of reduced gradients")


class ParallelConfig(Section):
    """Distributed training."""

    strategy: Literal["auto", "single", "ddp", "fsdp"] = Field(
        "auto", description="auto: single for one rank, else ddp"
    )
    context: Positive = Field(1, description="ranks that share each sequence; the others divide the batch")
    timeout_s: Seconds = Field(600.0, description="timeout of a collective")
    allow_single_rank: bool = Field(False, description="allow one process on a node with several GPUs")
    ddp: DDPConfig = DDPConfig()
    fsdp: FSDPConfig = FSDPConfig()


class CheckpointConfig(Section):
    """How often checkpoints are saved, and how many are kept."""

    every: NonNegative = Field(500, description="steps between checkpoints; 0 for the last only")
    keep: int = Field(3, ge=2, description="newest checkpoints that are kept, besides the best")
    background: bool = Field(True, description="write while training continues; false waits for every save")


class TelemetryConfig(Section):
    """What a run records."""

    every: Positive = Field(50, description="steps between samples of gate and selection statistics")
    attention: bool = Field(True, description="sample them at all")
    mem_dump_every: NonNegative = Field(0, description="steps between memory dumps; 0 for boot and step 1 only")
    per_rank: bool = Field(False, description="CSV files of every rank, not only of rank 0")
    tensorboard: bool = Field(True, description="write TensorBoard files")
    tracker: Literal["none", "wandb", "trackio"] = Field("none", description="send curves to a tracker, if installed")
    trace_grads: bool = Field(False, description="trace when every gradient arrives, with digests; slow")
    trace_modules: bool = Field(False, description="trace the order of modules in backward; slow")
    trace_buckets: bool = Field(False, description="trace DDP's gradient buckets; slow")
    watchdog_floor_s: Seconds = Field(60.0, description="shortest time without progress that counts as a hang")
    watchdog_first_step_s: Seconds = Field(600.0, description="the same for the first step")


class ReadinessConfig(Section):
    """The criteria of `nsa ready`."""

    max_mem_gib: PositiveFloat = Field(40.0, description="highest memory of one GPU")
    min_toks_per_s: NonNegativeFloat = Field(0.0, description="lowest throughput over all ranks")
    max_step_s: PositiveFloat | None = Field(None, description="longest median step")
    min_gpu_util: float = Field(80.0, ge=0.0, le=100.0, description="lowest GPU utilisation in percent")
    phase_limit_s: Seconds = Field(3600.0, description="how long a run of a phase may take")


class Architecture(Section):
    """The sections that build a model: the decoder, and one for each kind of attention that has settings."""

    model: ModelConfig = ModelConfig()
    nsa: NSAConfig = NSAConfig()


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
        if self.train.optimizer == "muon" and self.parallel.strategy == "fsdp":
            raise field_error(
                "train.optimizer", "muon needs whole matrices, which fsdp shards; use parallel.strategy=ddp or adamw"
            )
        ranks, length = self.parallel.context, self.train.seq_len
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
