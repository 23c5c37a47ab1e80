"""The model against straight-line float64 forms written here, which share no code with it."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from nanosprint.config import SoftcapSpec
from nanosprint.model.context import NO_CONTEXT
from nanosprint.model.gpt import GPT, mean_keys
from nanosprint.model.head import softcap
from nanosprint.recipes import all_recipes, load_recipe
from tests.recipes.test_ladder import LADDER, UPPER, small

TINY_GPT2 = ["model.dim=24", "model.num_heads=3", "model.num_layers=2", "model.vocab_size=50", "model.seq_len=16"]
X0_ENTRY = [
    {"source": "x", "weight": {"kind": "Scalar", "init": 1.0, "role": "entry"}},
    {"source": "x0", "weight": {"kind": "Scalar", "init": 0.0, "role": "entry"}},
]
X0_SKIP = {f"model.layers.{i}.entry": X0_ENTRY for i in range(2)}
TINY_GPT2 += ["train.batch_tokens=128", "eval.seq_len=16"]


def build(name, overrides, seed=3):
    model = GPT(load_recipe(name, overrides).model, compute_dtype=torch.float64).double()
    model.init_weights(seed)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():  # zeros and ones hide mistakes: move every weight
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return model, {n: p.detach() for n, p in model.named_parameters()}


def reduced(name):
    return small(name) if name in (*LADDER, *UPPER) else {}


def tokens(vocab_size, *shape, seed=11):
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def layer_norm(x, gain, bias, eps=1e-5):
    mean = x.mean(-1, keepdim=True)
    return (x - mean) / ((x - mean) ** 2).mean(-1, keepdim=True).add(eps).sqrt() * gain + bias


def causal(q, k, v, scale):
    scores = (q @ k.T) * scale
    scores = scores + torch.triu(torch.full_like(scores, -torch.inf), 1)
    return torch.exp(scores - torch.logsumexp(scores, -1, keepdim=True)) @ v


def gpt2_logits(ids, w, heads=3):
    """GPT-2 (Radford et al. 2019) for one row of ids, token by matrix."""
    x = w["embed.weight"][ids] + w["embed.positions"][: len(ids)]
    for i in range(2):
        p = f"layers.{i}."
        n = layer_norm(x, w[p + "mixer_norm.gain"], w[p + "mixer_norm.bias"])
        q, k, v = (n @ w[p + "mixer.qkv"].T + w[p + "mixer.qkv_bias"]).chunk(3, -1)
        y = [causal(a, b, c, 8**-0.5) for a, b, c in zip(*(t.chunk(heads, -1) for t in (q, k, v)), strict=True)]
        x = x + torch.cat(y, -1) @ w[p + "mixer.out"].T + w[p + "mixer.out_bias"]
        n = layer_norm(x, w[p + "mlp_norm.gain"], w[p + "mlp_norm.bias"])
        h = n @ w[p + "mlp.up"].T + w[p + "mlp.up_bias"]
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        x = x + h @ w[p + "mlp.down"].T + w[p + "mlp.down_bias"]
    return layer_norm(x, w["norm.gain"], w["norm.bias"]) @ w["embed.weight"].T


def test_gpt2_logits_and_loss():
    model, w = build("gpt2", TINY_GPT2)
    ids = tokens(50, 3, 16)
    truth = torch.stack([gpt2_logits(row, w) for row in ids])
    torch.testing.assert_close(model(ids), truth, rtol=1e-10, atol=1e-10)
    targets = tokens(50, 3, 16, seed=5)
    targets[0, 3] = -1
    log_p = truth.log_softmax(-1)
    loss = -sum(float(log_p[b, s, t]) for b, row in enumerate(targets.tolist()) for s, t in enumerate(row) if t >= 0)
    assert model.loss_sum(ids, targets).item() == pytest.approx(loss, rel=1e-12)


def rms(x):
    return x / (x.pow(2).mean(-1, keepdim=True) + 2**-23).sqrt()


def turn(x, base=10_000.0):
    """Rotary by complex numbers: dimension i and i + K/2 are the parts of one number."""
    S, K = x.shape
    frequency = torch.tensor([base ** (-i / (K // 2)) for i in range(K // 2)], dtype=torch.float64)
    angle = -torch.arange(S, dtype=torch.float64)[:, None] * frequency
    z = torch.complex(x[:, : K // 2], x[:, K // 2 :]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], -1)


def modern_logits(ids, w, heads, layers, *, x0=False, mix=False, cap=None):
    """The modern block: norm after the embedding, rotary, QK-norm, squared ReLU, skips where asked for."""
    x = x0_stream = rms(w["embed.weight"][ids])
    first = None
    K = x.size(-1) // heads
    for i in range(layers):
        p = f"layers.{i}."
        if x0:
            x = w[p + "entry.weights.0.value"] * x + w[p + "entry.weights.1.value"] * x0_stream
        q, k, v = (rms(x) @ w[p + "mixer.qkv"].T).chunk(3, -1)
        if mix:
            if first is None:
                first = v
            else:
                share = w[p + "mixer.value_mix"]
                v = (1 - share) * v + share * first
        y = [
            causal(turn(rms(a)), turn(rms(b)), c, K**-0.5)
            for a, b, c in zip(*(t.chunk(heads, -1) for t in (q, k, v)), strict=True)
        ]
        x = x + torch.cat(y, -1) @ w[p + "mixer.out"].T
        x = x + (rms(x) @ w[p + "mlp.up"].T).clamp(min=0) ** 2 @ w[p + "mlp.down"].T
    logits = rms(x) @ w["head.weight"].T
    return logits if cap is None else cap * torch.tanh(logits / cap)


@pytest.mark.parametrize("switches", [{}, {"x0": True}, {"mix": True}, {"cap": 5.0}, {"x0": True, "mix": True}])
def test_modern_block(switches):
    overrides = dict(X0_SKIP) if switches.get("x0") else {}
    overrides |= {"model.layers.1.mixer.value_residual": True} if switches.get("mix") else {}
    overrides |= {"model.softcap": {"cap": 5.0}} if switches.get("cap") else {}
    model, w = build("tiny", overrides)
    ids = tokens(257, 2, 21)
    truth = torch.stack([modern_logits(row, w, 2, 2, **switches) for row in ids])
    torch.testing.assert_close(model(ids), truth, rtol=1e-6, atol=1e-6)  # rotary tables are in fp32


def test_skips_by_tap():
    joined = [{"source": "x"}, {"source": "a", "weight": {"kind": "Scalar", "init": 0.5, "role": "skip"}}]
    overrides = {"model.num_layers": 3, "model.layers.0.tap": "a", "model.layers.2.join": joined}
    model, w = build("tiny", overrides)
    ids = tokens(257, 1, 9)
    x = x0 = rms(F.embedding(ids, model.embed.weight))
    outputs = []
    for i, layer in enumerate(model.layers):
        if i == 2:
            x = x + w["layers.2.join.weights.1.value"] * outputs[0]
        x = x + layer.mixer(rms(x), NO_CONTEXT, {}, {})
        x = x + layer.mlp(rms(x))
        outputs.append(x)
    torch.testing.assert_close(model.hidden(ids), rms(x))
    assert x0 is not x


def test_initial_values_make_switches_the_identity():
    """x0 skip and softcap wide open start as if they were not there; zero projections make each block the identity."""
    plain = GPT(load_recipe("tiny").model, compute_dtype=torch.float64).double()
    plain.init_weights(3)
    skip = GPT(load_recipe("tiny", X0_SKIP).model, compute_dtype=torch.float64).double()
    skip.init_weights(3)
    ids = tokens(257, 2, 12)
    torch.testing.assert_close(plain.hidden(ids), skip.hidden(ids))
    torch.testing.assert_close(plain.hidden(ids), rms(rms(F.embedding(ids, plain.embed.weight))))
    assert plain.loss_sum(ids, ids).item() == pytest.approx(24 * math.log(257))  # a zero head is uniform


def test_softcap_forms():
    z = torch.linspace(-60, 60, 13, dtype=torch.float64)
    tanh = softcap(z, SoftcapSpec(kind="tanh", cap=15.0))
    torch.testing.assert_close(tanh, 15 * (1 - 2 / (torch.exp(2 * z / 15) + 1)))
    sigmoid = softcap(z, SoftcapSpec(kind="sigmoid", cap=23.0, shift=5.0, width=7.5))
    torch.testing.assert_close(sigmoid, 23 / (1 + torch.exp(-(z + 5) / 7.5)))
    # 30 sigmoid(z / 7.5) is 15 tanh(z / 15) + 15: the same softmax
    torch.testing.assert_close(softcap(z, SoftcapSpec(kind="sigmoid", cap=30.0, width=7.5)) - 15, tanh)


def test_half_truncated_rotary_leaves_the_slow_half_alone():
    overrides = ['model.rotary={"base": 1024, "fraction": 0.5}', "model.dim=64"]
    model = GPT(load_recipe("tiny", overrides).model)
    x = torch.randn(1, 9, 2, 32)
    turned = model.rotary(x)
    still = [*range(8, 16), *range(24, 32)]
    assert torch.equal(turned[..., still], x[..., still])
    angle = 5 * 1024 ** -(3 / 7)  # position 5, frequency 3 of 0 .. 7
    x1, x2 = x[0, 5, 0, 3], x[0, 5, 0, 19]
    torch.testing.assert_close(turned[0, 5, 0, 3], x1 * math.cos(angle) + x2 * math.sin(angle))


def test_rotary_scores_depend_on_distance_only():
    rotary = GPT(load_recipe("tiny").model).rotary
    q, k = torch.randn(16), torch.randn(16)
    turned_q, turned_k = (rotary(t.expand(1, 20, 1, 16)).double()[0, :, 0] for t in (q, k))
    scores = turned_q @ turned_k.T
    for distance in range(1, 15):
        diagonal = torch.diagonal(scores, -distance)
        torch.testing.assert_close(diagonal, diagonal[0].expand_as(diagonal), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", list(all_recipes()))
def test_cache_gives_the_same_logits(name):
    model, _ = build(name, reduced(name))
    if not model.config.steps_with_cache:
        with pytest.raises(ValueError, match="look across tokens"):
            model.new_caches(2, 14)
        return
    vocab_size = model.config.vocab_size
    history = model.config.history
    ids = tokens(vocab_size, 2, history + 14)
    caches = model.new_caches(2, 14)
    borders = [0, 5, 9, 10, 11, 12, 13, 14]
    parts = [model(ids[:, a : history + b], caches=caches) for a, b in itertools.pairwise(borders)]
    torch.testing.assert_close(torch.cat(parts, 1), model(ids))


@pytest.mark.parametrize("name", list(all_recipes()))
def test_tokens_do_not_see_the_future(name):
    model, _ = build(name, reduced(name))
    place = model.config.history + 7
    ids = tokens(model.config.vocab_size, 1, place + 5)
    changed = ids.clone()
    changed[0, place] = (ids[0, place] + 1) % model.config.vocab_size
    difference = (model(ids) - model(changed)).detach().abs().amax(-1)[0]
    assert float(difference[:7].max()) == 0
    assert float(difference[7:].min()) > 0


def test_gpt2_has_the_published_number_of_parameters():
    with torch.device("meta"):
        assert GPT(load_recipe("gpt2").model).num_parameters() == 124_439_808


def test_initial_weights_are_those_of_the_seed_and_the_recipe():
    recipe = load_recipe("gpt2", [*TINY_GPT2[1:4], "model.dim=192"])
    a, b = GPT(recipe.model), GPT(recipe.model)
    a.init_weights(1)
    b.init_weights(1)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    b.init_weights(2)
    assert not torch.equal(a.embed.weight, b.embed.weight)
    assert float(a.layers[0].mixer.qkv.std()) == pytest.approx(0.02, rel=0.02)
    assert float(a.layers[0].mlp.down.std()) == pytest.approx(0.02 / 2, rel=0.02)  # / sqrt(2 * 2 layers)


@pytest.mark.parametrize(("kind", "std"), [("as_up", 0.5 / 96**0.5), ("as_linear", 0.5 / 384**0.5), (None, 0.0)])
def test_what_leaves_an_mlp_at_first(kind, std):
    """By the width of the model, or by the hidden units; attention's projections stay as they are."""
    words = ["model.dim=96", "model.num_heads=2", "model.num_layers=3", "model.vocab_size=64", "model.document_start=0"]
    words += [] if kind is None else [f"model.init.mlp_projection={kind}"]
    model = GPT(load_recipe("record", words).model)
    model.init_weights(1)
    assert model.config.init.linear_std == 0.5
    for layer in model.layers:
        assert layer.mlp.down.shape == (384, 96)  # (in, out)
        assert float(layer.mlp.down.detach().std()) == pytest.approx(std, rel=0.02)
        assert float(layer.mlp.up.detach().std()) == pytest.approx(0.5 / 96**0.5, rel=0.02)
    assert float(model.layers[0].mixer.out.detach().std()) == pytest.approx(0.5 / 96**0.5, rel=0.05)


def test_flops_are_those_of_the_formula():
    model = GPT(load_recipe("tiny").model)
    matrices = 2 * (4 * 32 * 32 + 2 * 32 * 128) + 257 * 32
    attention = 2 * 2 * 32 * sum(range(1, 33)) / 32 * 2  # layers, QK and AV, dim, mean keys, multiply-add
    assert model.flops_per_token(32) == pytest.approx(6 * matrices + 3 * attention)
    untied = load_recipe("gpt2", ["model.tied_head=false"])
    with torch.device("meta"):
        assert GPT(untied.model).flops_per_token(1024) == GPT(load_recipe("gpt2").model).flops_per_token(1024)


def test_learned_positions_cannot_be_extended():
    model = GPT(load_recipe("gpt2", TINY_GPT2).model)
    with pytest.raises(ValueError, match=r"learned positions end at model.seq_len=16; 17 were asked for"):
        model.extend(17)


@pytest.mark.parametrize(("seq_len", "window"), [(10, 3), (7, 0), (5, 4), (6, 9), (6, None)])
def test_mean_keys_by_counting(seq_len, window):
    seen = [len([j for j in range(t + 1) if window is None or t - j <= window]) for t in range(seq_len)]
    assert mean_keys(seq_len, window) == pytest.approx(sum(seen) / seq_len)
