"""The public interface of generation: an iterator of tokens and text."""

from collections.abc import Iterator, Sequence
from operator import index
from typing import Literal, NamedTuple, Protocol

from nsa.data.tokenizers import Tokenizer
from nsa.errors import ArgumentError, whole_number, whole_numbers
from nsa.generate.batch import TokenBatch
from nsa.generate.sampling import Sampling
from nsa.generate.text_stream import TextStream
from nsa.nn.cache import LONGEST
from nsa.nn.model import Decoder

SEEDS = (-(2**63), 2**64 - 1)  # the range that torch.Generator accepts


class Run(Protocol):
    """The attributes of the result of `nsa.load_run` that generation needs."""

    @property
    def model(self) -> Decoder: ...

    @property
    def tokenizer(self) -> Tokenizer: ...


class Generated(NamedTuple):
    """One token of one prompt.

    prompt   the number of the prompt
    token    its id; None if generation ended at a stop token or the separator
    text     the characters that the token completes: possibly none, or some whose first bytes came in earlier tokens
    end      None, or why this is the last token: "stop" for a stop token or text, "length" for `max_tokens`
    """

    prompt: int
    token: int | None
    text: str
    end: Literal["stop", "length"] | None


def generate_tokens(
    source: Run | Decoder,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    *,
    max_tokens: int = 200,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int | Sequence[int] = 0,
    stop: Sequence[str] | Sequence[int] = (),
) -> Iterator[Generated]:
    """Continues prompts with a cache: yields every token when it is generated, of all prompts in turn, with `prompt`
    (its number), `token`, `text` (the characters that it completes) and `end` (None, "stop" or "length").

    source        the result of `load_run`; or a model, if the prompts are lists of ids
    prompts       one batch of texts, each the start of a document, or of lists of ids; their lengths may differ,
                  and may exceed the length that the model was trained with
    max_tokens    the maximum number of new tokens per prompt
    temperature   0 always takes the most likely token
    top_k, top_p  sample from the k most likely tokens, and from the fewest whose probabilities sum to top_p
    seed          one for all prompts, or one for each; the samples of a prompt do not depend on the others
    stop          texts that end generation and are not part of the output; with a bare model, token ids. The
                  tokenizer's separator and data.end_tokens always end generation

    On a GPU a step is the replay of a CUDA graph. Needs the packages of the extra `train`.
    """
    model, tokenizer = (source, None) if isinstance(source, Decoder) else _parts(source)
    either = "a list of texts or of lists of token ids"
    wanted = either if tokenizer else "a list of lists of token ids, since a model has no tokenizer"
    ids: list[list[int]] = []
    try:
        for prompt in [prompts] if isinstance(prompts, str) else prompts:
            if prompt is prompts or (isinstance(prompt, str) and tokenizer is None):
                raise TypeError(f"got {prompt!r:.80}")
            if tokenizer is not None and isinstance(prompt, str):
                ids.append([tokenizer.separator, *tokenizer.encode(prompt).tolist()])  # as the start of a document
            else:
                ids.append([index(token) for token in prompt])  # type: ignore[arg-type]
    except TypeError as error:
        raise ArgumentError("prompts", f"must be {wanted}: {error}") from None
    longest = max(map(len, ids), default=0)
    max_tokens = whole_number("max_tokens", max_tokens, most=LONGEST - longest)
    seeds = whole_numbers("seed", seed, len(ids), *SEEDS)
    if len(seeds) != len(ids):
        raise ArgumentError("seed", f"must be one number, or one for each of {len(ids)} prompts; got {len(seeds)}")
    try:
        texts = [text for text in stop if isinstance(text, str)]
        stops = {index(token) for token in stop if not isinstance(token, str)}
        if isinstance(stop, str) or "" in texts or (texts and tokenizer is None):
            raise TypeError(f"got {stop!r:.80}")
    except TypeError as error:
        wanted = "must be a list of texts that are not empty, or with a bare model of token ids"
        raise ArgumentError("stop", f"{wanted}: {error}") from None
    if tokenizer is not None:
        stops.update(tokenizer.ends)
    streams = [TextStream(tokenizer.decode if tokenizer else lambda _: "", texts, prompt) for prompt in ids]
    batch = TokenBatch(model, ids, max_tokens, Sampling(temperature, top_k, top_p), seeds)
    return _generate(batch, streams, stops, max_tokens)


def _parts(source: Run) -> tuple[Decoder, Tokenizer]:
    try:
        return source.model, source.tokenizer
    except AttributeError:
        kind = type(source).__name__
        raise ArgumentError("source", f"must be the result of `load_run` or a Decoder; got {kind}") from None


def _generate(batch: TokenBatch, streams: list[TextStream], stops: set[int], max_tokens: int) -> Iterator[Generated]:
    for count in range(1, max_tokens + 1):
        for row, token in batch.next().items():
            stream, is_stop = streams[row], token in stops
            text = "" if is_stop else stream.push(token)
            end: Literal["stop", "length"] | None = "length" if count == max_tokens else None
            if is_stop or stream.stopped:
                end = "stop"
            if end is not None:
                text += stream.finish()
                batch.end(row)
            yield Generated(row, None if is_stop else token, text, end)
        if not batch.rows:
            return
