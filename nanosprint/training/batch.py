"""From the loader's batches to what the model is called with."""

from collections.abc import Hashable, Iterable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanosprint.config.recipe import Recipe
from nanosprint.config.schedule import LossWeights, StepPlan
from nanosprint.data.documents import DocumentEnds, document_ends, slots
from nanosprint.data.loader import Batch
from nanosprint.model.context import Context, LossTensors
from nanosprint.model.gpt import GPT
from nanosprint.ops.attention import Documents
from nanosprint.ops.attention_backends.measure import LONGEST, sample_lengths


class ModelInput(NamedTuple):
    """Arguments of `GPT.loss_sum`."""

    tokens: Tensor
    targets: Tensor
    context: Context


def leaves(value: Any) -> Iterator[Any]:
    """What tuples within tuples hold, in order, such as the tensors and numbers of a `ModelInput`."""
    if not isinstance(value, tuple):
        yield value
        return
    for part in value:
        yield from leaves(part)


def kind_of(inputs: ModelInput) -> tuple[Hashable, ...]:
    """What a graph's inputs are for it: the forms of tensors, and the values of all else."""
    return tuple(form_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves(inputs))


def form_of(tensor: Tensor) -> tuple[Hashable, ...]:
    return tuple(tensor.shape), tensor.stride(), str(tensor.dtype), str(tensor.device), tensor.requires_grad


class ModelStage:
    """Brings a model to the stage of a step: what of it follows the schedule and yet is no argument of its call.

    Today that is rotary's extension to the long windows so far. It is worked out anew whenever they change, from
    the plan alone, so that neither resuming nor going back after warm-up needs to know what was before.
    """

    def __init__(self, model: GPT) -> None:
        self._model = model
        self._windows: tuple[int, ...] | None = None
        self._scale: float | None = None

    def enter(self, plan: StepPlan) -> float | None:
        """Call it outside compiled code, before the step. The softmax scale from here on; None is the model's own."""
        config = self._model.config
        if config.rotary.yarn and plan.yarn != self._windows:
            factor = self._model.set_windows(plan.yarn)
            base = config.head_dim**-0.5 if config.attn_scale is None else config.attn_scale
            self._windows, self._scale = plan.yarn, base * factor
        return self._scale


def model_inputs(
    batches: Iterable[Batch], plan: StepPlan, attn_scale: float | None = None, parts: int = 1
) -> Iterator[ModelInput]:
    """Each batch with what the plan has for it and the ends of its documents. attn_scale: of `ModelStage.enter`.

    parts: how many inputs a batch becomes, by its rows.
    """
    loss: LossTensors | None = None
    for batch in (part for whole in batches for part in split_rows(whole, parts)):
        if loss is None and plan.loss is not None:
            loss = loss_tensors(plan.loss, batch.tokens.device)
        yield ModelInput(batch.tokens, batch.targets, context_of(batch.documents, plan, attn_scale, loss))


def split_rows(batch: Batch, parts: int) -> Iterator[Batch]:
    """The batch in `parts` batches of as many rows each. Raises ValueError where its rows cannot be shared so."""
    rows, rest = divmod(batch.tokens.size(0), parts)
    if rest:
        raise ValueError(f"{batch.tokens.size(0)} rows cannot be split into {parts} equal parts")
    pairs = zip(batch.tokens.split(rows), batch.targets.split(rows), strict=True)
    for i, (tokens, targets) in enumerate(pairs):
        documents, size = batch.documents, targets.numel()
        if documents is not None:
            # What lies before or behind becomes empty documents: the vector keeps its length, and so the graph.
            documents = documents._replace(ends=(documents.ends - i * size).clamp(0, size))
        yield Batch(tokens, targets, documents)


def context_of(
    documents: DocumentEnds | None,
    plan: StepPlan,
    attn_scale: float | None = None,
    loss: LossTensors | None = None,
) -> Context:
    """A layer's view of them."""
    return Context(
        documents=None if documents is None else Documents(documents.ends, documents.longest),
        short=None if plan.windows is None else plan.windows.short,
        long=None if plan.windows is None else plan.windows.long,
        attn_scale=attn_scale,
        loss=loss,
        head_counts=plan.head_counts,
    )


def loss_tensors(weights: LossWeights, device: torch.device) -> LossTensors:
    """The weights where the model is: as tensors, so that one graph serves while they change. None waits for a copy."""
    tokens = _on_device(torch.tensor(weights.tokens), device)
    prefix = _on_device(torch.tensor(weights.prefix), device) if weights.prefix else None
    return LossTensors(tokens, prefix, weights.sampled)


def _on_device(values: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)  # from other memory the host would wait for the device


def random_input(
    recipe: Recipe,
    plan: StepPlan,
    rows: int,
    device: torch.device,
    attn_scale: float | None = None,
    parts: int = 1,
    seed: int = 0,
) -> ModelInput:
    """Random tokens in the shapes of a micro-batch of `rows` rows of `plan`, or one of its parts; the same each time.

    In its strides, too, which a graph depends on: a single row cut out of a longer one would keep those of the longer.
    Where the softmax has a part of the vocabulary, ids are so few that it has room for all of them and a rest.
    Documents, where the recipe has them, are of web-like lengths, cut at the plan's `max_document`.
    """
    generator = torch.Generator().manual_seed(seed)  # its own, so that the run's random state is not touched
    model, data, seq_len = recipe.model, recipe.data, plan.seq_len
    tokens = torch.randint(_ids(recipe, plan), (rows, model.history + seq_len + 1), generator=generator)
    targets = tokens[:, model.history + 1 :].clone(memory_format=torch.contiguous_format)
    documents = None
    if model.document_start is not None:
        ends = torch.empty(slots(rows, seq_len, data.mean_document, data.spare_documents), dtype=torch.int32)
        tokens[tokens == model.document_start] = (model.document_start + 1) % model.vocab_size
        own = tokens[:, model.history : -1]
        own[_document_starts(recipe, plan, rows, seed)] = model.document_start
        longest = document_ends(own.numpy(), model.document_start, ends.numpy())
        documents = DocumentEnds(ends.to(device), longest)
    tokens = tokens[:, :-1].to(torch.int32, memory_format=torch.contiguous_format)
    batch = Batch(tokens.to(device), targets.to(device), documents)
    return next(model_inputs([batch], plan, attn_scale, parts))


def _ids(recipe: Recipe, plan: StepPlan) -> int:
    """How many token ids there are, the documents' start token aside."""
    sampled = None if plan.loss is None else plan.loss.sampled
    # Two thirds of the columns are labels' in real text, too; with more labels than columns losses are NaN.
    return recipe.model.vocab_size if sampled is None else 2 * sampled // 3


def document_bounds(recipe: Recipe, plan: StepPlan) -> tuple[int, int]:
    """Tokens of the shortest made-up document of such a step, a row's last aside, and of the longest.

    None is shorter than `data.mean_document`, so that the room made for their ends suffices.
    """
    shortest = recipe.data.mean_document
    most = max(LONGEST, shortest)
    return shortest, min(plan.seq_len, plan.max_document or most, most)


def _document_starts(recipe: Recipe, plan: StepPlan, rows: int, seed: int) -> Tensor:
    """(rows, seq_len) bool: the places at which made-up documents start."""
    shortest, longest = document_bounds(recipe, plan)
    lengths = sample_lengths(rows, plan.seq_len, longest, shortest=shortest, seed=seed)
    starts = torch.zeros(rows, plan.seq_len, dtype=torch.bool)
    for row, own in zip(starts, lengths, strict=True):
        row[torch.tensor([0, *accumulate(own[:-1])])] = True
    return starts
