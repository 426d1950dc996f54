"""The sections that build a model: the decoder, and one for each kind of attention that has settings."""

from dataclasses import fields
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from nsa.config.fields import HeadSize, NonNegative, Positive, PositiveFloat, Section, field_error
from nsa.errors import SpecError
from nsa.kinds import KINDS
from nsa.ops.spec import MSASpec, NSASpec


def _known_kind(kind: str) -> str:
    if kind not in KINDS:
        raise PydanticCustomError("kind", "{message}", {"message": f"must be one of {', '.join(KINDS)}"})
    return kind


LayerKind = Annotated[str, AfterValidator(_known_kind)]


class RopeScalingConfig(Section):
    """Scaling of the rotary frequencies for a longer context, as `nsa.nn.rope.RopeScaling` defines it."""

    factor: float = Field(1.0, ge=1.0, description="divisor of the rotary frequencies")
    original_length: Positive | None = Field(
        None,
        description="context length of the original training; if set, high frequencies are kept as in Llama 3.1, "
        "otherwise all frequencies are divided",
    )
    low_freq_factor: PositiveFloat = Field(1.0, description="fewer turns in original_length: frequency is divided")
    high_freq_factor: PositiveFloat = Field(4.0, description="more turns in original_length: frequency is kept")

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
    head_dim_k: HeadSize = Field(64, description="size of a query or key head")
    head_dim_v: HeadSize = Field(64, description="size of a value head")
    mlp_dim: int | None = Field(
        None, ge=1, le=2**22, description="width of the MLP; 8/3 * dim rounded up to a multiple of 64 when unset"
    )
    activation: Literal["swiglu", "swiglu_oai"] = Field(
        "swiglu",
        description="activation of the MLP; swiglu: silu(gate) * up; swiglu_oai, of GPT-OSS and MiniMax-M3: "
        "(up + 1) * gate * sigmoid(1.702 * gate), with gate and up clamped at 7",
    )
    attention: LayerKind = Field("nsa", description="kind of attention layers: nsa, msa, dense or window")
    layer_pattern: Annotated[list[LayerKind], Field(min_length=1)] | None = Field(
        None,
        description="kinds of attention layers (nsa, msa, dense, window), repeated over the layers, for example "
        "[dense, nsa, nsa, nsa]; every layer is of the kind `attention` when unset",
    )
    qk_norm: bool = Field(False, description="apply RMSNorm to the queries and keys of every head, before RoPE")
    tied_head: bool = Field(False, description="the output head shares the embedding's weight")
    rotary_dim: Annotated[int, Field(ge=2, multiple_of=2)] | None = Field(
        None, description="number of rotated channels of a query or key head, from the first; all when unset"
    )
    rope_base: float = Field(10_000.0, gt=1.0, description="base of the rotary frequencies")
    rope_scaling: RopeScalingConfig | None = Field(None, description="scaled rotary frequencies for a longer context")
    qkv_bias: bool = Field(False, description="biases in the projections of queries, keys and values")
    norm_eps: PositiveFloat = Field(1e-5, description="epsilon of RMSNorm")
    vocab_size: Positive | None = Field(
        None, description="rows of the embedding; the size of the tokenizer's vocabulary when unset, may be larger"
    )

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.n_heads % self.n_kv_heads:
            raise field_error("n_kv_heads", f"must divide n_heads; {self.n_kv_heads} does not divide {self.n_heads}")
        if self.rotary_dim is not None and self.rotary_dim > self.head_dim_k:
            raise field_error("rotary_dim", f"must be at most head_dim_k, {self.head_dim_k}, got {self.rotary_dim}")
        return self

    def layer_kinds(self) -> list[str]:
        """Returns the kind of attention of every layer."""
        pattern = self.layer_pattern or [self.attention]
        return [pattern[layer % len(pattern)] for layer in range(self.n_layers)]

    def resolved_mlp_dim(self) -> int:
        return self.mlp_dim or -(-(8 * self.dim // 3) // 64) * 64


class SpecSection(Section):
    """A section with the sizes of a spec, which checks them."""

    def spec(self) -> MSASpec | NSASpec:
        raise NotImplementedError

    @model_validator(mode="after")
    def _check_spec(self) -> Self:
        try:
            self.spec()
        except SpecError as error:
            raise field_error(error.field, error.rule) from None
        return self


class NSAConfig(SpecSection):
    """Native Sparse Attention: the sizes of NSASpec, and how the layer is built."""

    cmp_block: int = Field(32, description="tokens in one compression block, which becomes one compressed token")
    cmp_stride: int = Field(16, description="distance between the starts of neighbouring compression blocks")
    sel_block: int = Field(64, description="tokens in one selection block")
    num_selected: int = Field(16, description="blocks that each query reads, including the forced ones")
    num_init: int = Field(1, description="blocks at the start of the sequence that every query reads")
    num_local: int = Field(2, description="newest blocks, including the query's own, that every query reads")
    window: int = Field(512, description="tokens of the sliding window, including the query's own")
    phi: Literal["mean", "mlp", "mean_mlp"] = Field(
        "mean", description="how a block is compressed to one token; mean_mlp: mean + MLP, which is initialized to zero"
    )
    compress: Literal["before_rotation", "after_rotation"] = Field(
        "before_rotation", description="compress keys before or after RoPE is applied to them"
    )
    gate: Literal["sigmoid", "softmax"] = Field("sigmoid", description="activation of the branch gates")
    shared_kv: bool = Field(False, description="all three branches share one key and value projection")
    force_branch: Literal["cmp", "sel", "win"] | None = Field(None, description="train only this branch")

    def spec(self) -> NSASpec:
        return NSASpec(**{size.name: getattr(self, size.name) for size in fields(NSASpec)})


class MSAConfig(SpecSection):
    """MSA: the sizes of MSASpec, and how its index is trained."""

    block: int = Field(128, description="tokens in one block; a power of two from 16 to 256")
    num_selected: int = Field(16, description="blocks that each query reads, including the forced ones; at most 64")
    num_local: int = Field(1, description="newest blocks, including the query's own, that every query reads")
    num_init: int = Field(0, description="blocks at the start of the sequence that every query reads")
    index_dim: HeadSize | None = Field(None, description="size of an index head; head_dim_k when unset")
    loss_weight: PositiveFloat = Field(1.0, description="weight of the index loss, which is added to the loss")
    warmup_steps: NonNegative = Field(0, description="first steps, in which attention is dense and the index learns")

    def spec(self) -> MSASpec:
        return MSASpec(**{size.name: getattr(self, size.name) for size in fields(MSASpec)})


class Architecture(Section):
    """The sections that build a model: the decoder, and one for each kind of attention that has settings."""

    model: ModelConfig = ModelConfig()
    nsa: NSAConfig = NSAConfig()
    msa: MSAConfig = MSAConfig()
