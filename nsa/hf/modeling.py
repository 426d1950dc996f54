"""The decoder as a causal language model of transformers: configuration, model, cache.

Rows of a batch may be padded on either side, as `attention_mask` says. The model moves the padding to the end of every
row, since positions, blocks and windows of NSA count from the first token.

Legend: B batch, S tokens, C channels, V vocabulary.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint
from transformers import Cache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, MoeCausalLMOutputWithPast
from transformers.utils import logging
from transformers.utils.generic import can_return_tuple

from nsa.config.architecture import Architecture
from nsa.errors import ArgumentError, CheckpointError
from nsa.nn.cache import KVCache
from nsa.nn.model import Decoder
from nsa.parallel.transform import recompute

CODE_FILE = "modeling_nsa.py"  # nsa/hf/standalone.py in an exported folder, for trust_remote_code=True


class NSALMConfig(PreTrainedConfig):
    """`model` and `nsa` are the sections of this project's configuration, as plain data.

    package      address of this package for pip, for users who load the model
    use_cache    default of `generate()` if the generation config does not set it. A forward pass creates a cache only
                 if its own argument says so: a cache has no gradient
    """

    model_type = "nsa"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012  (transformers adds a list to it)

    def __init__(
        self,
        vocab_size: int = 256,
        max_position_embeddings: int = 2048,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        use_cache: bool = True,
        package: str | None = None,
        **options: Any,
    ):
        given = {name: options.pop(name) for name in Architecture.model_fields if name in options}
        sections = Architecture(**given)
        for name, section in sections.model_dump(mode="json").items():
            setattr(self, name, section)
        self.vocab_size, self.max_position_embeddings, self.use_cache = vocab_size, max_position_embeddings, use_cache
        self.package = package
        self.hidden_size, self.num_hidden_layers = sections.model.dim, sections.model.n_layers
        self.num_attention_heads, self.num_key_value_heads = sections.model.n_heads, sections.model.n_kv_heads
        self.tie_word_embeddings = sections.model.tied_head
        self.bos_token_id, self.eos_token_id, self.pad_token_id = bos_token_id, eos_token_id, pad_token_id
        options.pop("tie_word_embeddings", None)
        super().__init__(**options)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Does nothing: `trust_remote_code=True` calls it, and `save_pretrained` would then copy this module, which
        needs the package, and name it in `auto_map`."""

    def sections(self) -> Architecture:
        return Architecture(**{name: getattr(self, name) for name in Architecture.model_fields})


class NSACache(Cache):
    """`nsa.nn.cache.KVCache` for `generate()`, with one sequence per row of the batch.

    Beam search, which reorders rows, is not supported.
    """

    def __init__(self, model: "NSAForCausalLM", batch_size: int, max_length: int, *, slack: int = 64):
        super().__init__(layers=[])
        self.kv = KVCache(model.decoder, sequences=batch_size, max_length=max_length, slack=slack)
        for _ in range(batch_size):
            self.kv.add()
        self._tokens = 0  # tokens per row, including padding

    def __len__(self) -> int:
        return len(self.kv.layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._tokens

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.kv.max_length

    def append(self, counts: list[int], width: int) -> Any:
        """Returns the cache step of a forward pass over `width` tokens per row, of which `counts` are not padding."""
        longest = max(self.kv.length(row) + count for row, count in zip(self.kv.sequences, counts, strict=True))
        if longest > self.kv.max_length:
            self.kv.grow(_with_room(longest))
        step = self.kv.append(counts)
        self._tokens += width
        return step

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last tokens of every row, which must not be padding; transformers passes a negative number."""
        if tokens_to_remove > 0:
            raise ArgumentError(
                "tokens_to_remove", f"must be 0 or the negated number of tokens, got {tokens_to_remove}"
            )
        for sequence in self.kv.sequences:
            self.kv.crop(self.kv.length(sequence) + tokens_to_remove, sequence)
        self._tokens += tokens_to_remove

    def reset(self) -> None:
        self.kv.crop(0)
        self._tokens = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise _refused("beam search")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise _refused("repeating the rows of a filled cache")

    def batch_select_indices(self, indices: Tensor) -> None:
        raise _refused("selecting rows of a filled cache")

    @property
    def is_croppable(self) -> bool:
        return True


class _Backbone:
    """The decoder without its head, called as in transformers: TRL computes the head and the loss in parts itself."""

    def __init__(self, causal: "NSAForCausalLM"):
        self._causal = causal

    def __call__(self, *arguments: Any, **options: Any) -> BaseModelOutputWithPast:
        found: Any = self._causal.hidden(*arguments, **options)
        return BaseModelOutputWithPast(*found[:2])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._causal.decoder, name)


class NSAForCausalLM(PreTrainedModel, GenerationMixin):
    """The decoder with transformers' interface; its parameters are `decoder.*` with this project's names."""

    config_class = NSALMConfig
    base_model_prefix = "decoder"
    supports_gradient_checkpointing = True
    gradient_checkpointing = False
    _no_split_modules = ["DecoderBlock"]  # noqa: RUF012  (read by transformers)
    _tied_weights_keys = {"decoder.head.weight": "decoder.embedding.weight"}  # noqa: RUF012  (read by transformers)

    def __init__(self, config: NSALMConfig):
        super().__init__(config)
        self.decoder = Decoder(config.sections(), config.vocab_size)
        self.post_init()  # type: ignore[no-untyped-call]

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Does nothing: the decoder initialises itself."""

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **options: Any) -> Any:
        """Loads the model. Raises CheckpointError if a tensor is missing or has another shape, since it would stay
        uninitialised memory."""
        loaded: Any = super().from_pretrained(*args, output_loading_info=True, **options)
        model, info = loaded
        if info["missing_keys"]:
            missing = ", ".join(sorted(info["missing_keys"])[:3])
            raise CheckpointError(f"{model.name_or_path}: has no tensor for {missing}")
        if info["mismatched_keys"]:
            others = ", ".join(sorted(name for name, *_ in info["mismatched_keys"])[:3])
            raise CheckpointError(
                f"{model.name_or_path}: has another shape of {others} than the configuration; for another vocabulary, "
                "load the model with its own and call resize_token_embeddings"
            )
        if model.generation_config.use_cache is None:  # set now: Trainer changes the config later
            model.generation_config.use_cache = model.config.use_cache
        return (model, info) if output_loading_info else model

    def save_pretrained(self, save_directory: Any, *args: Any, **options: Any) -> None:
        """Also writes the file that `trust_remote_code=True` loads."""
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        # First: the next line may push the folder to the hub.
        shutil.copyfile(Path(__file__).with_name("standalone.py"), Path(save_directory) / CODE_FILE)
        super().save_pretrained(save_directory, *args, **options)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.decoder.embedding

    def set_input_embeddings(self, value: Any) -> None:
        self.decoder.embedding, self.decoder.vocab_size = value, value.num_embeddings

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.decoder.head

    def set_output_embeddings(self, value: Any) -> None:
        self.decoder.head = value

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = checkpoint, every_n_layers: int = 1
    ) -> None:
        """Recomputes whole blocks as this project's trainer does, whatever the options of `checkpoint`; selected blocks
        are kept."""
        if getattr(gradient_checkpointing_func, "func", checkpoint) is not checkpoint:
            raise ArgumentError("offload", "of gradient checkpointing is not supported")
        recompute(self, "none")
        for block in self.decoder.blocks[::every_n_layers] if enable else ():
            recompute(block, "block", compiled=True)  # works with and without torch.compile
        self.gradient_checkpointing = enable

    @property
    def base_model(self) -> Any:
        return _Backbone(self)

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: NSACache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **options: Any,
    ) -> MoeCausalLMOutputWithPast:
        """The arguments are those of `hidden`, and transformers' `labels` and `logits_to_keep`.

        In training, the loss of a model with MSA layers includes their index loss, times `msa.loss_weight`. `aux_loss`
        of the result is its mean over the batch, without the weight and without a gradient.
        """
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        index_terms = self._index_terms()  # before the layers: wrappers that shard may hide parameters after them
        counted = _counted(input_ids, labels, kept, **options) if index_terms else None
        hidden_BSC, past_key_values, index_losses = self.hidden(
            input_ids,
            attention_mask,
            past_key_values,
            use_cache,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            cu_seq_lens_q=cu_seq_lens_q,
            counted=counted,
            **options,
        )
        logits_BSV = self.decoder.head(hidden_BSC[:, kept])
        loss: Any = None
        aux_loss: Any = None
        if labels is not None:
            loss = self.loss_function(logits_BSV, labels, vocab_size=self.config.vocab_size, **options)
        if counted is not None and index_losses:
            device = loss.device
            kl = torch.stack([kl.to(device) for kl, _ in index_losses]).sum()
            queries = index_losses[0][1].to(device)  # the same in all layers
            index_loss = kl / (index_terms * queries.clamp(min=1))
            # The batches of a step add up to a mean weighted by their targets, as those of the cross-entropy do.
            items = options.get("num_items_in_batch")
            share = 1.0 if items is None else counted.sum().to(device) / torch.as_tensor(items, device=device)
            loss, aux_loss = loss + self.config.msa["loss_weight"] * share * index_loss, index_loss.detach()
        return MoeCausalLMOutputWithPast(
            loss=loss, aux_loss=aux_loss, logits=logits_BSV, past_key_values=past_key_values
        )

    def _index_terms(self) -> int:
        """The summands of the index loss per query; 0 where no index is trained."""
        return self.decoder.num_index_terms() if self.training and torch.is_grad_enabled() else 0

    def hidden(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: NSACache | None = None,
        use_cache: bool | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        counted: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, NSACache | None, list[list[Tensor]]]:
        """Returns the input of the head, [B, S, C], the cache, and with `counted` the index loss of each layer.

        attention_mask  [B, past and new tokens], 1 for tokens and 0 for padding before or after them
        position_ids    a packed document starts where they do not rise by 1, as in transformers; padding and a cache
                        are refused then. Their values do not matter: positions count from the start of a document
        cu_seq_lens_q   the borders of packed documents in the concatenated rows, instead of position_ids
        past_key_values the cache to continue, without gradients
        counted         [B, S] bool, the tokens that have a target
        """
        for name in ("output_attentions", "output_hidden_states"):
            if options.get(name, getattr(self.config, name, False)):
                raise ArgumentError(name, "is not supported: layers return only their output")
        if input_ids is None or inputs_embeds is not None:
            raise ArgumentError("input_ids", "must be given; inputs_embeds is not supported")
        if past_key_values is not None and not isinstance(past_key_values, NSACache):
            raise ArgumentError("past_key_values", f"must be an NSACache, got {type(past_key_values).__name__}")
        rows, width = input_ids.shape
        known = 0 if past_key_values is None else past_key_values.get_seq_length()
        if attention_mask is not None and list(attention_mask.shape) not in ([rows, width], [rows, known + width]):
            shape = list(attention_mask.shape)
            raise ArgumentError("attention_mask", f"must be [{rows}, {known + width}], batch and tokens, got {shape}")
        mask = None if attention_mask is None else attention_mask[:, -width:].bool()
        if mask is not None and not torch.compiler.is_compiling() and bool(mask.all()):  # synchronizes with the GPU
            mask = None
        order = None if mask is None else torch.argsort(~mask, dim=1, stable=True)  # tokens before padding
        tokens_BS = input_ids if order is None else input_ids.gather(1, order)
        if past_key_values is None and use_cache and not self.training:
            past_key_values = NSACache(self, rows, _with_room(width))
        documents = _documents(position_ids, mask, rows, width) if cu_seq_lens_q is None else cu_seq_lens_q
        if documents is not None and (mask is not None or past_key_values is not None):
            name = "position_ids" if cu_seq_lens_q is None else "cu_seq_lens_q"
            raise ArgumentError(name, "packed documents are not supported together with padding or a cache")
        if position_ids is None and cu_seq_lens_q is None and options.get("seq_idx") is not None:
            raise ArgumentError("seq_idx", "needs position_ids or cu_seq_lens_q, which mark packed documents")
        index_losses: list[list[Tensor]] = []
        shape = [rows, width] if documents is None else [1, rows * width]
        if past_key_values is not None:
            hidden_BSC = self._continued(tokens_BS, mask, past_key_values)
        else:
            if counted is None and not torch.compiler.is_compiling() and self._index_terms():
                logging.get_logger(__name__).warning_once(
                    "The index of MSA is not trained: its loss needs labels; transformers.Trainer passes them, TRL not."
                )
            if counted is not None:
                counted = counted if mask is None or order is None else (counted & mask).gather(1, order)
                counted = counted.reshape(shape)
            hidden_BSC, index_losses = self.decoder.run(tokens_BS.reshape(shape), documents, counted=counted)
            hidden_BSC = hidden_BSC.view(rows, width, -1)
        if order is not None:
            # Padding gets the output of the row's last token: generate() reads it in rows with padding at the end.
            last = mask.sum(1, keepdim=True) - 1  # type: ignore[union-attr]
            inverse = torch.argsort(order, dim=1).minimum(last).clamp(min=0)
            hidden_BSC = hidden_BSC.gather(1, inverse[..., None].expand_as(hidden_BSC))
        return hidden_BSC, past_key_values, index_losses

    # The cache counts tokens on the host: every step would recompile.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def _continued(self, tokens_BS: Tensor, mask: Tensor | None, cache: NSACache) -> Tensor:
        rows, width = tokens_BS.shape
        counts = [width] * rows if mask is None else mask.sum(1).tolist()
        longest = max(counts)
        hidden_BSC: Tensor
        if longest == 0:  # padding alone, whose output has no meaning
            cache._tokens += width
            hidden_BSC = self.decoder.embedding(tokens_BS)
            return hidden_BSC
        hidden_BSC = self.decoder.hidden(tokens_BS[:, :longest], cache=cache.append(counts, width))
        return pad(hidden_BSC, (0, 0, 0, width - longest))

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], mode: Any, batch_size: int, max_cache_length: int
    ) -> Any:
        if generation_config.use_cache is False:
            return None
        mask = model_kwargs.get("attention_mask")
        if generation_config.prefill_chunk_size is not None and mask is not None and not mask[:, -1].all():
            raise ArgumentError("prefill_chunk_size", "needs padding on the left; set tokenizer.padding_side = 'left'")
        if generation_config.num_beams > 1:
            raise _refused("beam search")
        if model_kwargs.get("past_key_values") is not None:
            return None
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise _refused(f"cache_implementation={generation_config.cache_implementation!r}")
        rows = batch_size * (generation_config.num_return_sequences or 1)
        drafts = (generation_config.prompt_lookup_num_tokens, generation_config.num_assistant_tokens)
        slack = max(64, *(tokens or 0 for tokens in drafts))  # rejected draft tokens are removed again
        max_length = min(max_cache_length + 1, _with_room(0 if mask is None else mask.shape[1]))
        model_kwargs["past_key_values"] = NSACache(self, rows, max_length, slack=slack)
        return None


def _with_room(tokens: int) -> int:
    """The length of a cache for these tokens and some more; a cache grows with its text."""
    return tokens + max(512, tokens // 8)


def _counted(
    input_ids: Tensor | None,
    labels: Tensor | None,
    kept: slice | Tensor,
    shift_labels: Tensor | None = None,
    ignore_index: int = -100,
    **_: Any,
) -> Tensor | None:
    """The tokens that have a target in the cross-entropy of transformers, [B, S] bool; None without labels."""
    if input_ids is None or labels is None:
        return None
    targets = pad(labels[:, 1:], (0, 1), value=ignore_index) if shift_labels is None else shift_labels
    counted = torch.zeros_like(input_ids, dtype=torch.bool)
    counted[:, kept] = (targets != ignore_index).to(counted.device)
    return counted


def _documents(position_ids: Tensor | None, mask: Tensor | None, rows: int, width: int) -> Tensor | None:
    """Returns `cu_seqlens` of the concatenated rows, or None if every row is one document. The mask is False for
    padding, whose positions do not matter."""
    if position_ids is None or width == 1:
        return None
    is_start = position_ids.expand(rows, width).diff(dim=1) != 1
    if mask is not None:
        is_start = is_start & mask[:, 1:] & mask[:, :-1]
    if not is_start.any():
        return None
    starts = pad(is_start, (1, 0), value=True).flatten().nonzero().flatten()
    return pad(starts, (0, 1), value=rows * width).to(torch.int32)


def _refused(what: str) -> ArgumentError:
    return ArgumentError(
        "generation", f"{what} is not supported by the NSA cache; decode greedily, sample, or set use_cache=False"
    )
