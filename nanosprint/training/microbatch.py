"""Into which micro-batches a step is dealt: as large as memory allows, stage by stage.

A micro-batch is one or more whole lanes of a process. `exec.lanes_per_microbatch` says how many, or "auto": at every
step the most whose tokens stay within `exec.tokens_per_microbatch`, so that stages with short lanes take more of them
at once. Which lanes a step has does not depend on it, and losses are sums, so that only rounding changes (and FP8's
scales, which are those of a micro-batch: no difference of theirs in loss was seen, docs/log.md).

How many tokens are worth it. A micro-batch costs the same few passes over every gradient however many tokens it has,
and its kernels the same launches. gpt2, of 124 M parameters, gained nothing from 131,072 tokens over 65,536 on an H200
(528,269 against 530,926 tokens/s); the record has five times as many parameters, most of them in tables, whose
gradients each micro-batch filled and added up when this was settled (now it adds rows alone). So `auto` wants a token
for every 2,048 parameters, and 65,536 at least.

How many fit. With gpt2, 12 layers of 768, the peak was 26.6 GiB at 65,536 tokens and 51.0 GiB at 131,072: 0.4 MB for
each further token, which is 44 bytes for each layer and dimension, the head's share included (its logits come in parts
of at most a sixteenth of the memory). residuals, whose layers keep more, took 1.25 times that. What parameters take at
most, 28 bytes each in fp32 (weight, gradient, two moments, and the warm-up's copy of all but the gradient), is taken
off; of the rest six tenths are counted on, and where that was too much the warm-up finds out (`smaller`).
"""

import math
from dataclasses import replace

import torch

from nanosprint.config.recipe import Execution, Recipe
from nanosprint.errors import UserError
from nanosprint.model.gpt import GPT
from nanosprint.optim.sharding import from_first
from nanosprint.training.distributed import World

_TOKENS = {"cuda": 65_536, "mps": 16_384, "cpu": 16_384}  # at least, where they fit
_PARAMETERS_PER_TOKEN = 2_048
_BYTES_PER_PARAMETER = 28
_BYTES_PER_TOKEN = 44  # of every layer and dimension
_SHARE = 0.6  # of the memory that is left
_BUDGETS = (0.5, 0.25, 0.1)  # shares of the activations to try where memory is short: each costs a compilation


def lanes_of(batch_tokens: int, lanes: int, execution: Execution) -> int:
    """Lanes of a micro-batch where a step has `batch_tokens` in `lanes`; tokens and processes must be resolved."""
    if execution.lanes_per_microbatch != "auto":
        return execution.lanes_per_microbatch
    limit = resolved(execution.tokens_per_microbatch)
    return max([k for k in _choices(lanes, execution.gpus) if k * batch_tokens // lanes <= limit], default=1)


def rows_of(batch_tokens: int, recipe: Recipe, execution: Execution) -> int:
    """Rows of a micro-batch of such a step."""
    lanes = recipe.train.lanes
    return batch_tokens // lanes // recipe.row_tokens(batch_tokens) * lanes_of(batch_tokens, lanes, execution)


def micro_batches_of(batch_tokens: int, lanes: int, execution: Execution) -> int:
    """Micro-batches that a process has of such a step."""
    return lanes // (execution.gpus * lanes_of(batch_tokens, lanes, execution))


def part_choices(recipe: Recipe, execution: Execution) -> list[int]:
    """Into how many parts of whole rows every micro-batch can be split."""
    rows = math.gcd(*(rows_of(tokens, recipe, execution) for tokens in recipe.batches().values()))
    return [k for k in range(1, rows + 1) if rows % k == 0]


def resolve_micro_batches(execution: Execution, recipe: Recipe, world: World) -> Execution:
    """The same execution with its micro-batches settled: their tokens, lanes and parts.

    `tokens_per_microbatch` becomes the tokens of the largest. Raises UserError for what cannot be dealt.
    """
    lanes, execution = recipe.train.lanes, replace(execution, gpus=world.size)
    if lanes % world.size:
        fits = _divisors(lanes)
        raise UserError(f"{world.size} processes cannot share train.lanes={lanes} equally: use one of {fits}")
    if execution.lanes_per_microbatch != "auto":
        execution = _with_lanes(execution, recipe)
    else:
        execution = _with_tokens(execution, recipe, world.device)
    return replace(execution, parts_per_microbatch=_parts(execution, recipe))


def _with_lanes(execution: Execution, recipe: Recipe) -> Execution:
    """So many lanes at every step, as was asked for."""
    k, limit = execution.lanes_per_microbatch, execution.tokens_per_microbatch
    choices = _choices(recipe.train.lanes, execution.gpus)
    if k not in choices:
        raise UserError(
            f"exec.lanes_per_microbatch={k} does not divide the {choices[-1]} lanes of each of "
            f"{execution.gpus} processes: use one of {choices}"
        )
    largest = _largest(execution, recipe)
    if limit != "auto" and limit < largest:
        raise UserError(
            f"exec.lanes_per_microbatch={k} makes micro-batches of up to {largest} tokens, more than "
            f"exec.tokens_per_microbatch={limit}: leave one of them out"
        )
    return replace(execution, tokens_per_microbatch=largest)


def _with_tokens(execution: Execution, recipe: Recipe, device: torch.device) -> Execution:
    """As many lanes at each step as stay within the limit that was asked for, or within our own."""
    lane, limit = _largest_lane(recipe), execution.tokens_per_microbatch
    if limit == "auto":
        limit = from_first(tokens_worth_it(execution, recipe, device))  # by free memory, so processes might differ
    elif limit < lane:
        raise UserError(
            f"exec.tokens_per_microbatch={limit} is less than a lane of the largest batch, {lane} tokens: set it to "
            "that or more; exec.parts_per_microbatch splits a lane of several rows"
        )
    return _within(execution, recipe, limit)


def _within(execution: Execution, recipe: Recipe, limit: int) -> Execution:
    """With a lane at least, and as its limit the tokens of the largest micro-batch that there really is."""
    execution = replace(execution, tokens_per_microbatch=limit)
    return replace(execution, tokens_per_microbatch=_largest(execution, recipe))


def tokens_worth_it(execution: Execution, recipe: Recipe, device: torch.device) -> int:
    """What exec.tokens_per_microbatch=auto stands for on `device`; see the module's head."""
    if device.type != "cuda":
        return _TOKENS[device.type]
    free = torch.cuda.mem_get_info(device)[0]
    if execution.memory_gb is not None:
        free = min(free, int(execution.memory_gb * 1e9))
    with torch.device("meta"):
        parameters = GPT(recipe.model).num_parameters()
    return min(max(_TOKENS["cuda"], parameters // _PARAMETERS_PER_TOKEN), tokens_that_fit(recipe, parameters, free))


def tokens_that_fit(recipe: Recipe, parameters: int, memory: float) -> int:
    """Tokens of a micro-batch that `memory` bytes surely hold beside a model of so many parameters."""
    model = recipe.model
    left = max(0.0, memory - _BYTES_PER_PARAMETER * parameters)
    return int(_SHARE * left / (_BYTES_PER_TOKEN * model.dim * model.num_layers))


def _parts(execution: Execution, recipe: Recipe) -> int:
    parts = execution.parts_per_microbatch
    if parts in ("auto", 1):
        return 1
    choices = part_choices(recipe, execution)
    if parts not in choices:
        raise UserError(
            f"exec.parts_per_microbatch={parts} does not divide the rows of a micro-batch of up to "
            f"{execution.tokens_per_microbatch} tokens: use one of {choices}"
        )
    return parts


def smaller(recipe: Recipe, execution: Execution, wanted: Execution) -> Execution | None:
    """The next that takes less memory: fewer tokens, then parts of a lane, then fewer activations kept.

    None where that is not enough, or `wanted` leaves us no choice.
    """
    tokens, parts = resolved(execution.tokens_per_microbatch), resolved(execution.parts_per_microbatch)
    lane = _largest_lane(recipe)
    if wanted.lanes_per_microbatch == wanted.tokens_per_microbatch == "auto" and tokens > lane:
        fewer = _within(execution, recipe, max(lane, tokens // 2))
        if parts == 1 or parts in part_choices(recipe, fewer):
            return fewer
    more = [k for k in part_choices(recipe, execution) if k > parts]
    if wanted.parts_per_microbatch == "auto" and more:
        return replace(execution, parts_per_microbatch=more[0])
    less = [share for share in _BUDGETS if share < float(execution.activation_budget)]
    if wanted.activation_budget == "auto" and less and execution.compile != "off":
        return replace(execution, activation_budget=less[0])
    return None


def resolved(choice: int | str) -> int:
    """A setting that "auto" no longer stands for."""
    assert isinstance(choice, int), f"{choice!r} is still to be resolved"
    return choice


def _largest(execution: Execution, recipe: Recipe) -> int:
    """Tokens of the largest micro-batch of the run."""
    lanes = recipe.train.lanes
    return max(lanes_of(tokens, lanes, execution) * tokens // lanes for tokens in recipe.batches().values())


def _largest_lane(recipe: Recipe) -> int:
    return recipe.max_batch_tokens // recipe.train.lanes


def _choices(lanes: int, processes: int) -> list[int]:
    """How many lanes a micro-batch can have."""
    return _divisors(lanes // processes)


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]
