"""Another mixer than attention: a decaying sum of what came before, put into one layer of the toy."""

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from nanosprint.config import Execution
from nanosprint.model.context import Context
from nanosprint.model.gpt import GPT, mean_keys
from nanosprint.model.linear import init_linear
from nanosprint.model.mixer import MIXERS
from nanosprint.model.roles import Role
from nanosprint.ops.attention import Documents
from nanosprint.recipes import load_recipe
from nanosprint.training.attention_choice import attention_calls
from nanosprint.training.batch import random_input
from nanosprint.training.distributed import World
from nanosprint.training.microbatch import resolve_micro_batches
from nanosprint.training.setup import build_state
from nanosprint.training.step import backward_of, train_step

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class DecaySpec:
    """y_t = W x_t + rate * y_{t-1}, within a document."""

    rate: float


@dataclass
class DecayCache:
    last_BD: torch.Tensor
    length: int = 0


class Decay(nn.Module):
    ROLES = {"weight": Role("matrix.decay")}

    def __init__(self, config, spec, rotary, attend, stream_dtype, layouts):
        super().__init__()
        self.rate, self.init = spec.rate, config.init
        self.weight = nn.Parameter(torch.empty(config.dim, config.dim))

    def init_weights(self, generator):
        init_linear(self.weight, self.init, generator)

    def forward(self, n_BSD, context, sources, columns, cache=None):
        B, S, _ = n_BSD.shape
        v = n_BSD @ self.weight.to(n_BSD.dtype).T
        place = torch.arange(S, device=v.device)
        apart = (place[:, None] - place[None, :]).clamp(min=0)
        weights = (self.rate**apart).tril().to(v.dtype)
        if context.documents is not None:
            number = torch.bucketize(torch.arange(B * S, device=v.device), context.documents.cu_seqlens, right=True)
            number = number.view(B, S)
            weights = weights * (number[:, :, None] == number[:, None, :])
        y = weights @ v
        if cache is not None:
            y = y + self.rate ** (place + 1)[None, :, None] * cache.last_BD[:, None]
            cache.last_BD, cache.length = y[:, -1], cache.length + S
        return y

    def new_cache(self, batch_size, capacity, dtype):
        return DecayCache(torch.zeros(batch_size, self.weight.size(0), dtype=dtype))


@pytest.fixture
def recipe(monkeypatch):
    monkeypatch.setitem(MIXERS, DecaySpec, Decay)
    tiny = load_recipe("tiny", {"model.document_start": 7})
    first, *rest = tiny.model.layers
    other = (replace(first, mixer=DecaySpec(rate=0.5)), *rest)
    return replace(tiny, model=replace(tiny.model, layers=other)).validate()


@pytest.fixture
def model(recipe):
    model = GPT(recipe.model)
    model.init_weights(0)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
    return model


def test_a_step_with_the_cache_is_the_packed_forward_pass(model):
    ids = torch.randint(8, 257, (2, 14), generator=torch.Generator().manual_seed(1))
    caches = model.new_caches(2, 14)
    assert [type(cache).__name__ for cache in caches] == ["DecayCache", *["KVCache"] * (len(caches) - 1)]
    borders = [0, 5, 9, 10, 11, 12, 13, 14]
    parts = [model(ids[:, a:b], caches=caches) for a, b in itertools.pairwise(borders)]
    torch.testing.assert_close(torch.cat(parts, 1), model(ids))


def test_documents_of_a_packed_row_are_read_as_if_alone(model):
    tokens = torch.randint(8, 257, (2, 32), generator=torch.Generator().manual_seed(1))
    ends = [0, 5, 6, 32, 40, 64]
    documents = Documents(torch.tensor([*ends, 64], dtype=torch.int32), 26)
    logits = model(tokens, Context(documents=documents)).flatten(0, 1)
    for start, stop in itertools.pairwise(ends):
        alone = model(tokens.flatten()[None, start:stop])[0]
        torch.testing.assert_close(logits[start:stop], alone, rtol=1e-4, atol=1e-5)


def test_it_trains_in_one_graph(recipe):
    execution = Execution(device="cpu", compute="fp32", attention="sdpa", compile="off")
    state = build_state(recipe, execution, 0, CPU)
    inputs = [random_input(recipe, recipe.plan(0), recipe.train.batch_tokens // recipe.model.seq_len, CPU)]
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(state.model.loss_sum, dynamic=False, fullgraph=True, backend=graphs)
    before = state.model.layers[0].mixer.weight.detach().clone()
    losses = []
    for step in range(8):
        plan = recipe.plan(step)
        losses.append(float(train_step(backward_of(compiled), state, inputs, plan, recipe.train)))
        state.step += 1
    assert graphs.frame_count == 1
    assert losses[-1] < 0.97 * losses[0]
    assert not torch.equal(state.model.layers[0].mixer.weight, before)


def test_only_attention_counts_as_attention(recipe, model):
    execution = resolve_micro_batches(Execution(device="cpu"), recipe, World(0, 1, CPU))
    calls = sum(call.count for call in attention_calls(recipe, execution))
    plain = load_recipe("tiny", {"model.document_start": 7})
    assert 0 < calls < sum(call.count for call in attention_calls(plain, execution))
    attending, dim = GPT(plain.model), plain.model.dim
    assert attending.flops_per_token(32) - model.flops_per_token(32) == 6 * 3 * dim**2 + 12 * dim * mean_keys(32, None)
