"""The whole model of `sub3`, in float64, against the records' description written out with layer numbers.

Records #11 to #21: U-net skips, value tables on the outer layers, long and short windows inside documents, one layer
without attention, rotary positions of which half stand still, a sigmoid softcap. It shares no code with the package.
"""

import math

import pytest
import torch

from nanosprint.model.context import Context
from nanosprint.model.gpt import GPT
from nanosprint.ops.attention import Documents
from nanosprint.recipes import load_recipe

DIM, HEADS, VOCAB = 48, 3, 130
SHORT, LONG = 4, 9
LONG_LAYERS, NO_ATTENTION = (0, 4, 11), 7
TABLE_OF = {0: 0, 1: 1, 2: 2, 9: 0, 10: 1, 11: 2}
DOCUMENTS = (1, 13, 5, 21)
SMALL = {
    "model.dim": DIM,
    "model.num_heads": HEADS,
    "model.vocab_size": VOCAB,
    "model.document_start": VOCAB - 1,
    "model.seq_len": 40,
    "train.batch_tokens": 320,
    "eval.seq_len": 40,
    "eval.batch_tokens": 40,
}


def rms(x, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def turned(x):
    """x (T, K): pair (i, i + K/2) turns clockwise by position x (1/1024)^(i/(K/4 - 1)); pairs from K/4 on do not."""
    T, K = x.shape
    out = x.clone()
    for t in range(T):
        for i in range(K // 4):
            angle = t * (1 / 1024) ** (i / (K // 4 - 1))
            a, b = x[t, i], x[t, i + K // 2]
            out[t, i] = a * math.cos(angle) + b * math.sin(angle)
            out[t, i + K // 2] = b * math.cos(angle) - a * math.sin(angle)
    return out


def attended(q, k, v, window):
    """One head, (T, K) each: a token sees itself and `window` tokens before it, of its own document."""
    out, start = torch.zeros_like(v), 0
    for length in DOCUMENTS:
        for t in range(start, start + length):
            first = max(start, t - window)
            scores = 0.12 * (k[first : t + 1] @ q[t])
            out[t] = (scores - scores.logsumexp(0)).exp() @ v[first : t + 1]
        start += length
    return out


def logits_by_hand(ids, w):
    x = x0 = rms(w["embed.weight"][ids], 2**-23)
    tables = w["value_tables.weight"][ids].view(len(ids), 3, DIM)
    left = []
    for i in range(12):
        p = f"layers.{i}."
        if i >= 6:
            x = x + w[p + "join.weights.1.value"] * left[11 - i]
        x = w[p + "entry.weights.0.value"] * x + w[p + "entry.weights.1.value"] * x0
        if i != NO_ATTENTION:
            q, k, v = (rms(x, 1e-6) @ w[p + "mixer.qkv"].T).split(DIM, -1)
            v = w[p + "mixer.values.weights.0.value"] * v
            if i in TABLE_OF:
                v = v + w[p + "mixer.values.weights.1.value"] * tables[:, TABLE_OF[i]]
            window = LONG if i in LONG_LAYERS else SHORT
            heads = zip(*(t.chunk(HEADS, -1) for t in (q, k, v)), strict=True)
            y = [attended(turned(rms(a, 2**-23)), turned(rms(b, 2**-23)), c, window) for a, b, c in heads]
            x = x + torch.cat(y, -1) @ w[p + "mixer.out"].T
        x = x + (rms(x, 1e-6) @ w[p + "mlp.up"].T).clamp(min=0) ** 2 @ w[p + "mlp.down"].T
        left.append(x)
    return 30 * torch.sigmoid(rms(x, 1e-6) @ w["head.weight"].T / 7.5)


@pytest.fixture(scope="module")
def model():
    config = load_recipe("sub3", SMALL).model
    model = GPT(config, attention="reference", compute_dtype=torch.float64).double()
    model.init_weights(0)
    with torch.no_grad():  # zeros and ones hide mistakes: move every weight
        for i, p in enumerate(model.parameters()):
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i), dtype=p.dtype))
    return model


def test_forward_and_backward(model):
    ids = torch.randint(VOCAB, (sum(DOCUMENTS),), generator=torch.Generator().manual_seed(1))
    ends = torch.tensor([0, *DOCUMENTS, 0]).cumsum(0).int()
    context = Context(documents=Documents(ends, max(DOCUMENTS)), short=SHORT, long=LONG)
    weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    expected = logits_by_hand(ids, weights)
    torch.testing.assert_close(model(ids[None], context)[0].double(), expected.detach(), rtol=1e-6, atol=1e-6)  # fp32
    targets = ids.roll(-1)
    loss = -expected.log_softmax(-1).gather(1, targets[:, None]).sum()
    model.zero_grad()
    ours = model.loss_sum(ids[None], targets[None], context)
    ours.backward()
    torch.testing.assert_close(ours.detach(), loss.detach(), rtol=1e-10, atol=0)
    for name, grad in zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True):
        assert grad.any(), name
        got = model.get_parameter(name).grad
        torch.testing.assert_close(got, grad, rtol=1e-8, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def test_value_tables_add_nothing_but_their_share(model):
    """At a weight of zero a table has no say; its rows are those of the tokens themselves."""
    ids = torch.tensor([[3, 7, 3]])
    context = Context(documents=Documents(torch.tensor([0, 3], dtype=torch.int32), 3), short=SHORT, long=LONG)
    shares = [p for n, p in model.named_parameters() if n.endswith("mixer.values.weights.1.value")]
    assert len(shares) == len(TABLE_OF)
    before, kept = model(ids, context), [p.detach().clone() for p in shares]
    with torch.no_grad():
        table = model.value_tables.weight.clone()
        model.value_tables.weight[[i for i in range(VOCAB) if i not in (3, 7)]] = float("nan")
        assert torch.equal(model(ids, context), before)
        for p in shares:
            p.zero_()
        model.value_tables.weight.fill_(5.0)
        without = model(ids, context)
        model.value_tables.weight.fill_(-5.0)
        assert torch.equal(model(ids, context), without)
        model.value_tables.weight.copy_(table)
        for p, value in zip(shares, kept, strict=True):
            p.copy_(value)
    assert not torch.allclose(without, before)
