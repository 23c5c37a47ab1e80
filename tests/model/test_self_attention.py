"""A whole attention layer with its techniques against loops over rows, heads and tokens in float64."""

import itertools
from dataclasses import replace

import pytest
import torch

from nanosprint.config.model import AttnSpec, ComposeSpec, InitSpec, LayerSpec, ModelConfig, RotarySpec
from nanosprint.config.wiring import Column, Fixed, Gate, GateNetSpec, Product, Read, Scalar, Term
from nanosprint.model.attention import SelfAttention
from nanosprint.model.context import Context
from nanosprint.model.mixing import Columns, NetLayouts
from nanosprint.model.rotary import Rotary
from nanosprint.ops.attention import pack_documents, sdpa

H, K, S = 6, 8, 9
D = H * K
LENGTHS = [4, 5, 2, 7]  # of documents in two rows
COMMON = {
    "window": "short",
    "separate_qk": True,
    "qkv_scale": Scalar(init=0.5, role="sa"),
    "out_scale": Scalar(init=1.0, role="sa"),
    "head_gate": Column(net="g", init=0.25),
}
GATED_TABLE = Term(
    source="table0", weight=Gate(reads=(Read(source="n", dims=3), Read(source="table0", dims=2)), role="ve", scale=2.0)
)
PLAIN = AttnSpec(
    **COMMON,
    values=(
        Term(source="v", weight=Fixed(value=0.5)),
        GATED_TABLE,
        Term(source="tap", weight=Product(factors=(Scalar(init=0.3, role="mix"), Column(net="g", width=2)))),
    ),
    key_offset=((4, 6), (7, 8)),
    xsa=Column(net="g"),
    compose=ComposeSpec(mix=Column(net="g"), add=Column(net="g"), window=3),
)
PAIRED = AttnSpec(**COMMON, paired=True, values=(Term(source="v"), GATED_TABLE))


def config_of(spec, **changes):
    rotary = RotarySpec(base=1024.0, fraction=0.5, pairs="neighbours")
    init = InitSpec(projections="zero", attn_projection="as_linear")
    given = {"vocab_size": 9, "dim": D, "num_heads": H, "seq_len": S, "rotary": rotary, "init": init} | changes
    return ModelConfig(layers=(LayerSpec(mixer=spec, mlp=None),), **given)


def build(spec, config=None):
    """The layer, moved off its initial values, and what it is called with."""
    config, layouts = config or config_of(spec), NetLayouts([GateNetSpec(name="g")])
    rotary = Rotary(config.rotary, config.head_dim, S, places=2)
    layer = SelfAttention(config, spec, rotary, sdpa, torch.float64, layouts).double()
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    layer.init_weights(torch.Generator().manual_seed(1))
    with torch.no_grad():
        for p in layer.parameters():
            p += 0.2 * random(*p.shape)
    x, table, tap, gates = random(2, S, D), random(2, S, D), random(2, S, D), random(2, S, sum(layouts.sizes("g")))
    return layer, x, table, tap, gates, layouts


def call(layer, x, table, tap, gates, layouts, context, cache=None):
    columns = {"g": Columns(gates, layouts.sizes("g"))} if gates.size(-1) else {}
    return layer(x, context, {"n": x, "table0": table, "tap": tap}, columns, cache)


def by_hand(layer, spec, x, table, tap, gates, scale, window, documents=None):
    """One row (S, D) at a time; `documents` are the numbers of the tokens' documents, (2, S)."""
    w = dict(layer.named_parameters())
    lam_in, lam_out = w["qkv_scale.value"], w["out_scale.value"]
    names = [("mix", 2)] if len(spec.values) > 2 else []
    names += [("xsa", H)] if spec.xsa else []
    names += [("head", H)]
    names += [("w1", H), ("w2", H)] if spec.compose else []
    rows = []
    for b in range(len(x)):
        column = dict(zip([n for n, _ in names], gates[b].split([n for _, n in names], -1), strict=True))
        q, k = ((x[b] @ (lam_in * part).T).view(S, H, K) for part in w["qk"].chunk(2))
        v = (x[b] @ (lam_in * w["v"]).T).view(S, H, K)
        table_h, tap_h = table[b].view(S, H, K), tap[b].view(S, H, K)
        gate = 2 / (1 + torch.exp(-torch.cat([x[b, :, :3], table[b, :, :2]], -1) @ w["values.weights.1.weight"].T))
        if len(spec.values) > 2:
            halves = w["values.weights.2.factors.0.value"] * column["mix"][:, [0, 0, 0, 1, 1, 1]]
            v = 0.5 * v + gate[..., None] * table_h + halves[..., None] * tap_h
        else:
            v = v + gate[..., None] * table_h
        q, k = (turned(t / ((t**2).mean(-1, keepdim=True) + 2**-23).sqrt(), spec.paired) for t in (q, k))
        for start, stop in spec.key_offset:
            k = torch.stack([torch.cat([k[t, :, :start], k[max(t - 1, 0), :, start:stop], k[t, :, stop:]], -1)
                             for t in range(S)])  # fmt: skip
        document = [0] * S if documents is None else documents[b]
        y = []
        for t, h in itertools.product(range(S), range(H)):
            y.append(softmax_over(seen(t, h, spec.paired, window, document), q[t, h], k, v, scale))
        y = torch.stack(y).view(S, H, K)
        if spec.compose:
            y = y + composed(q, k, v, column["w1"], column["w2"], scale, spec.compose.window, document)
        if spec.xsa:
            y = y - torch.tanh(column["xsa"])[..., None] * ((y * v).sum(-1) / (v * v).sum(-1))[..., None] * v
        y = y * column["head"][..., None]
        rows.append(y.reshape(S, D) @ (lam_out * w["out"]).T)
    return torch.stack(rows)


def turned(x, paired):
    """Frequencies 1 and 1/1024 turn the first two pairs of neighbours; paired, odd heads stand half a token later."""
    position = torch.arange(S, dtype=torch.float64)[:, None]
    if paired:
        position = 2 * position + torch.arange(H) % 2
    angle = position[..., None] * torch.tensor([1.0, 1 / 1024, 0.0, 0.0], dtype=torch.float64)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * angle.cos() + b * angle.sin(), b * angle.cos() - a * angle.sin()], -1).flatten(-2)


def seen(t, h, paired, window, document):
    """(token, head) of the keys that head h of token t may use."""
    if not paired:
        return [(j, h) for j in range(S) if 0 <= t - j <= window and document[j] == document[t]]
    slot, here = h % (H // 2), 2 * t + h // (H // 2)
    places = [(p // 2, slot + p % 2 * (H // 2)) for p in range(here + 1) if here - p <= window]
    return [(j, g) for j, g in places if document[j] == document[t]]


def softmax_over(places, q, k, v, scale):
    e = torch.stack([(scale * (q @ k[j, g])).exp() for j, g in places])
    return sum(weight * v[j, g] for weight, (j, g) in zip(e / e.sum(), places, strict=True))


def composed(q, k, v, w1, w2, scale, window, document):
    out = torch.zeros_like(v)
    for t in range(S):
        keys = [j for j in range(t + 1) if t - j < window and document[j] == document[t]]
        size = ((w1[t] ** 2).mean() + 1e-6).sqrt()
        maps = torch.stack([(scale * (k[keys, h] @ q[t, h])).softmax(0) for h in range(H)])
        mixed = (w1[t] / size) @ maps
        for h in range(H):
            out[t, h] = w2[t, h] * (mixed @ v[keys, h])
    return out


@pytest.mark.parametrize("spec", [PLAIN, PAIRED], ids=["plain", "paired"])
@pytest.mark.parametrize("packed", [True, False])
def test_layer_by_hand(spec, packed):
    layer, *inputs, layouts = build(spec)
    context = Context(
        documents=pack_documents(LENGTHS, slots=7) if packed else None, short=5, attn_scale=0.4 if packed else None
    )
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS)).view(2, S).tolist() if packed else None
    got = call(layer, *inputs, layouts, context)
    want = by_hand(layer, spec, *inputs, 0.4 if packed else K**-0.5, 5, documents)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    weight = torch.randn(want.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    for name, a, b in zip(
        names, *(torch.autograd.grad((t * weight).sum(), parameters) for t in (got, want)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("spec", [PLAIN, PAIRED], ids=["plain", "paired"])
def test_one_graph_and_the_same_numbers(spec):
    layer, *inputs, layouts = build(spec)
    context = Context(documents=pack_documents(LENGTHS, slots=7), short=5)

    def loss(*inputs):
        return call(layer, *inputs, layouts, context).square().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=False, backend="aot_eager")
    parameters = list(layer.parameters())
    for a, b in zip(*(torch.autograd.grad(f(*inputs), parameters) for f in (compiled, loss)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("spec", [PLAIN, PAIRED], ids=["plain", "paired"])
def test_token_by_token_from_a_cache(spec):
    layer, x, table, tap, gates, layouts = build(spec)
    context = Context(short=5)
    cache = layer.new_cache(2, S, torch.float64)
    parts = [
        call(layer, *(t[:, a:b] for t in (x, table, tap, gates)), layouts, context, cache)
        for a, b in itertools.pairwise([0, 3, 4, 5, 8, S])
    ]
    torch.testing.assert_close(torch.cat(parts, 1), call(layer, x, table, tap, gates, layouts, context))


def test_bf16_stays_bf16():
    layer, x, table, tap, gates, layouts = build(PLAIN)
    layer.bfloat16()
    layer.stream_dtype = torch.bfloat16
    for name, p in layer.named_parameters():
        if name.endswith("_scale.value"):
            p.data = p.data.float()  # numbers of size 0 leave the weights' dtype alone
    narrow = (t.bfloat16() for t in (x, table))
    got = call(layer, *narrow, tap.float(), gates.bfloat16(), layouts, Context(short=5))
    want = by_hand(layer.double(), PLAIN, x, table, tap, gates, K**-0.5, 5)
    assert got.dtype == torch.bfloat16
    assert float(((got.double() - want).norm() / want.norm()).detach()) < 0.03


def test_matrices_and_what_they_are_for():
    layer, *_ = build(PLAIN)
    shapes = {n: tuple(p.shape) for n, p in layer.named_parameters(recurse=False)}
    assert shapes == {"qk": (2 * D, D), "v": (D, D), "out": (D, D)}
    assert layer.ROLES["qk"].name == "matrix.qk"
    assert layer.ROLES["qk"].blocks == H  # pairs of heads, of queries and of keys
    assert layer.ROLES["v"].name == "matrix.v"
    layer.init_weights(torch.Generator().manual_seed(0))
    assert float(layer.out.detach().std()) > 0  # attn_projection, where other projections start at zero
    one = SelfAttention(
        config_of(AttnSpec(separate_qk=True), num_heads=1), AttnSpec(separate_qk=True), None, sdpa, torch.float32,
        NetLayouts([]),
    )  # fmt: skip
    assert one.ROLES["qk"].blocks == 2
    merged = SelfAttention(config_of(AttnSpec()), AttnSpec(), None, sdpa, torch.float32, NetLayouts([]))
    assert {n for n, _ in merged.named_parameters()} == {"qkv", "out"}


@pytest.mark.parametrize(
    ("spec", "changes", "message"),
    [
        (PAIRED, {"num_heads": 3}, "num_heads=3 is odd"),
        (PAIRED, {"rotary": RotarySpec()}, "model.rotary.pairs=neighbours, not halves"),
        (AttnSpec(paired=True, key_offset=((4, 6),)), {}, "has no place for xsa, key_offset or compose"),
        (AttnSpec(key_offset=((6, 9),)), {}, r"key_offset holds \(6, 9\)"),
        (AttnSpec(compose=replace(PLAIN.compose, window=0)), {}, "compose.window=0 counts the token itself"),
    ],
)
def test_what_heads_cannot_do_together(spec, changes, message):
    spec = replace(spec, values=(Term(source="v"),), head_gate=None)
    with pytest.raises(ValueError, match=message):
        config_of(spec, nets=(GateNetSpec(name="g"),), input_nets=("g",), **changes).validate()
