"""From the loader's batches to what the model is called with."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nanosprint.config.recipe import Recipe
from nanosprint.config.schedule import Windows
from nanosprint.data.documents import DocumentEnds, document_ends, slots
from nanosprint.data.loader import Batch
from nanosprint.model.context import Context
from nanosprint.ops.attention import Documents

_LONG_DOCUMENT = 2048  # tokens; most batches of tens of thousands of tokens hold one longer than half of that


class ModelInput(NamedTuple):
    """Arguments of `GPT.loss_sum`."""

    tokens: Tensor
    targets: Tensor
    context: Context


def model_inputs(batches: Iterable[Batch], windows: Windows | None) -> Iterator[ModelInput]:
    """Each batch with the windows of the step and the ends of its documents, where the recipe has such."""
    for batch in batches:
        yield ModelInput(batch.tokens, batch.targets, context_of(batch.documents, windows))


def context_of(documents: DocumentEnds | None, windows: Windows | None) -> Context:
    """A layer's view of them. The bound on documents' lengths is a round number: every new one is a new graph."""
    bounded = None
    if documents is not None:
        bounded = Documents(documents.ends, max(_LONG_DOCUMENT, 1 << (documents.longest - 1).bit_length()))
    return Context(
        documents=bounded,
        short=None if windows is None else windows.short,
        long=None if windows is None else windows.long,
    )


def random_input(recipe: Recipe, rows: int, seq_len: int, device: torch.device, step: int = 0) -> ModelInput:
    """Random tokens in the shapes of a micro-batch of `rows` rows at `step`, the same at every call."""
    generator = torch.Generator().manual_seed(0)  # its own, so that the run's random state is not touched
    model = recipe.model
    tokens = torch.randint(model.vocab_size, (rows, model.history + seq_len + 1), generator=generator)
    targets = tokens[:, model.history + 1 :].contiguous()
    documents = None
    if model.document_start is not None:
        ends = torch.empty(slots(rows, seq_len, recipe.data.mean_document), dtype=torch.int32)
        every = max(recipe.data.mean_document, 2)
        tokens[tokens == model.document_start] = (model.document_start + 1) % model.vocab_size
        tokens[:, model.history :: every] = model.document_start
        own = tokens[:, model.history : -1].numpy()
        longest = document_ends(own, model.document_start, recipe.data.mean_document, ends.numpy())
        documents = DocumentEnds(ends.to(device), longest)
    context = context_of(documents, recipe.plan(step).windows)
    return ModelInput(tokens[:, :-1].to(device, torch.int32), targets.to(device), context)
