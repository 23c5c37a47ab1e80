"""Text from a trained model, token by token, with keys and values cached where the model's techniques allow it."""

import logging
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nanosprint.errors import UserError
from nanosprint.model.context import NO_CONTEXT, Context
from nanosprint.model.gpt import GPT

_log = logging.getLogger(__name__)


@torch.no_grad()
def generate(
    model: GPT,
    prompt: Sequence[int],
    num_tokens: int,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    context: Context = NO_CONTEXT,
) -> Iterator[int]:
    """Yield `num_tokens` ids that continue `prompt`; the same seed gives the same ids.

    vocab_size: ids the tokenizer knows; a softmax may have more columns, which are never drawn. temperature 0 takes
    the likeliest token. context: the windows of attention, where the model has such. The model sees as many tokens as
    it was trained with: then the older half of them is dropped and the rest is read again. Raises UserError for
    settings out of range.
    """
    _check(prompt, num_tokens, vocab_size, temperature, top_k)
    device = model.embed.weight.device
    generator = torch.Generator().manual_seed(seed)
    capacity, history = model.config.seq_len, model.config.history
    ids = [0] * history + list(prompt)  # zeros are what the loader puts before a text's first token, too
    unread, held = min(len(prompt), capacity), 0  # tokens that the caches still have to take, and that they hold
    caches = model.new_caches(1, capacity) if model.config.steps_with_cache else None
    if caches is None:
        _log.info("the model's techniques look across tokens: the whole context is read anew for every token")
    for _ in range(num_tokens):
        logits = model(torch.tensor([ids[-history - unread :]], device=device), context, caches)[0, -1]
        token = draw(logits[:vocab_size], temperature, top_k, generator)
        yield token
        ids.append(token)
        held = unread if caches is None else held + unread
        unread = unread + 1 if caches is None else 1
        if held == capacity:
            caches = None if caches is None else model.new_caches(1, capacity)
            unread, held = max(1, capacity // 2), 0


def draw(logits_V: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """Draw one id from softmax(logits / temperature), restricted to the `top_k` likeliest where given."""
    logits = logits_V.double().cpu()
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < logits.numel():
        threshold = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))


def _check(prompt: Sequence[int], num_tokens: int, vocab_size: int, temperature: float, top_k: int | None) -> None:
    if not prompt:
        raise UserError("the prompt is empty: give at least one character")
    if num_tokens < 1:
        raise UserError(f"--tokens {num_tokens} must be at least 1")
    if temperature < 0:
        raise UserError(f"--temperature {temperature} must not be negative")
    if top_k is not None and top_k < 1:
        raise UserError(f"--top-k {top_k} must be at least 1")
    unknown = next((i for i in prompt if not 0 <= i < vocab_size), None)
    if unknown is not None:
        raise UserError(f"prompt token {unknown} is outside the vocabulary of {vocab_size}")
