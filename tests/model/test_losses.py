"""Training's objective: several targets and the prefix, against loops over tokens in float64."""

import pytest
import torch

from nanosprint.config import Execution, SoftcapSpec
from nanosprint.model.context import Context, LossTensors
from nanosprint.model.gpt import GPT
from nanosprint.model.head import Head
from nanosprint.ops.head_loss import Fp8Scales, head_loss
from nanosprint.recipes import load_recipe
from nanosprint.training.setup import build_state

V, D = 50, 16
LOSSES = [
    None,
    LossTensors(torch.tensor([1.0])),
    LossTensors(torch.tensor([1.0, 0.5, 0.2494]), torch.tensor(0.25)),
    LossTensors(torch.tensor([1.0, 0.3]), torch.tensor(0.0)),
    LossTensors(torch.tensor([0.7, 0.5, 0.25, 0.1])),
]


def head(layout="out_in", softcap=None, train_loss=None):
    overrides = {"model.dim": D, "model.num_heads": 2, "model.vocab_size": V, "model.head_layout": layout}
    config = load_recipe("tiny", overrides | {"model.softcap": softcap}).model
    module = Head(config, train_loss).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        weight = torch.randn(V, D, dtype=torch.float64, generator=generator)
        module.weight.copy_(weight.mT if layout == "in_out" else weight)
    module.set_prefixes(torch.randint(-1, V, (V - 3,), generator=generator))
    return module


def batch(B=3, S=11):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(B, S, D, dtype=torch.float64, generator=generator)
    targets = torch.randint(V, (B, S), generator=generator)
    targets[0, S // 3] = targets[1, 0] = targets[2, S - 1] = -1
    targets[0, S - 1] = targets[0, S - 2]  # a label twice
    return x.requires_grad_(), targets


def by_hand(module, x, targets, loss):
    """(value, gradient of the logits): token by token. The gradient counts all weights where targets run out."""
    W = module.weight.detach()
    W = W.mT if module.in_out else W
    z = (x.detach() @ W.mT).requires_grad_()
    spec = module.config.softcap
    logits = z if spec is None else spec.cap / (1 + torch.exp(-(z + spec.shift) / spec.width))
    weights = [1.0] if loss is None else loss.tokens.double().tolist()
    omega = 0.0 if loss is None or loss.prefix is None else loss.prefix.double().item()
    value = torch.zeros((), dtype=torch.float64)
    published = torch.zeros((), dtype=torch.float64)
    for row, row_targets in zip(logits, targets.tolist(), strict=True):
        for t, first in enumerate(row_targets):
            lse = torch.logsumexp(row[t], 0)
            for k, w in enumerate(weights):
                if t + k >= len(row_targets):
                    published = published + w * lse
                elif row_targets[t + k] >= 0:
                    value = value + w * (lse - row[t, row_targets[t + k]])
            if first >= 0 and module.prefixes[first] >= 0:
                value = value + omega * (lse - row[t, module.prefixes[first]])
    (grad,) = torch.autograd.grad(value + published, z)
    return value.detach(), grad @ W, torch.einsum("bsv,bsd->vd", grad, x.detach())


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("layout", ["out_in", "in_out"])
@pytest.mark.parametrize("train_loss", [None, head_loss])
def test_value_and_published_gradient(loss, layout, train_loss):
    module = head(layout, SoftcapSpec(kind="sigmoid", cap=23.0, shift=5.0, width=7.5), train_loss)
    x, targets = batch()
    value, dx, dw = by_hand(module, x, targets, loss)
    out = module.loss_sum(x, targets, None, loss)
    (out / 8).backward()
    torch.testing.assert_close(out.detach(), value, rtol=1e-10, atol=0)
    torch.testing.assert_close(8 * x.grad, dx, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(8 * module.weight.grad, dw.mT if layout == "in_out" else dw, rtol=1e-9, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(module.loss_sum(x, targets, None, loss), value, rtol=1e-10, atol=0)


def test_rows_shorter_than_the_reach():
    module = head()
    x, targets = batch(4, 2)
    loss = LOSSES[4]
    value, dx, _ = by_hand(module, x, targets, loss)
    out = module.loss_sum(x, targets, None, loss)
    torch.testing.assert_close(out.detach(), value)
    torch.testing.assert_close(torch.autograd.grad(out, x)[0], dx)


def test_rows_do_not_see_each_other():
    module = head()
    x, targets = batch()
    together = module.loss_sum(x, targets, None, LOSSES[2])
    apart = sum(module.loss_sum(x[i : i + 1], targets[i : i + 1], None, LOSSES[2]) for i in range(3))
    torch.testing.assert_close(together, apart)


def test_prefixes():
    module = head()
    with pytest.raises(ValueError, match="vocabulary of 50"):
        module.set_prefixes(torch.zeros(51, dtype=torch.int64))
    with pytest.raises(ValueError, match="below 50"):
        module.set_prefixes(torch.tensor([50]))
    with pytest.raises(ValueError, match="int32"):
        module.set_prefixes(torch.zeros(5, dtype=torch.int32))
    before = module.prefixes
    module.set_prefixes(torch.tensor([3, 1]))
    assert module.prefixes is before
    assert before[:3].tolist() == [3, 1, -1]
    assert not any("prefixes" in name for name in module.state_dict())


def test_model_passes_the_objective_on():
    recipe = load_recipe("tiny")
    model = GPT(recipe.model, compute_dtype=torch.float64).double()
    model.init_weights(0)
    vocab = recipe.model.vocab_size
    torch.nn.init.normal_(model.head.weight)
    model.set_prefixes(torch.arange(vocab) - 1)
    tokens = torch.randint(vocab, (2, 9))
    loss = LossTensors(torch.tensor([0.0, 1.0]), torch.tensor(0.0))
    shifted = torch.cat([tokens[:, 1:], torch.full((2, 1), -1)], 1)
    expected = model.loss_sum(tokens, shifted)
    torch.testing.assert_close(model.loss_sum(tokens, tokens, Context(loss=loss)), expected)
    assert model.loss_sum(tokens, tokens) != expected


@pytest.mark.parametrize("layout", ["out_in", "in_out"])
def test_layouts_give_the_same_model(layout):
    x, targets = batch()
    module, other = head(layout), head("out_in")
    torch.testing.assert_close(module(x, None), other(x, None))
    assert module(x, None).shape == (3, 11, V)
    with torch.no_grad():
        torch.testing.assert_close(module.loss_sum(x, targets, None), other.loss_sum(x, targets, None))


def test_initial_weights():
    overrides = {"model.vocab_size": 2000, "model.init.head": "normal", "model.init.head_std": 0.005}
    for layout in ("out_in", "in_out"):
        module = Head(load_recipe("tiny", overrides | {"model.head_layout": layout}).model)
        module.init_weights(torch.Generator().manual_seed(0))
        assert module.weight.std().item() == pytest.approx(0.005, rel=0.02)
    with pytest.raises(ValueError, match="head_std"):
        load_recipe("tiny", {"model.init.head": "normal"})
    with pytest.raises(ValueError, match="head_copy"):
        load_recipe("gpt2", {"model.head_layout": "in_out"})


def test_one_graph_for_all_values_of_the_weights():
    scales = Fp8Scales(0.1, 0.01, 0.01)
    graphs = []

    def count(graph_module, inputs):
        graphs.append(graph_module)
        return torch._dynamo.lookup_backend("aot_eager")(graph_module, inputs)

    for options in (None, lambda *a, **k: head_loss(*a, scales=scales, **k)):
        module = head("in_out", SoftcapSpec(), options).float()
        x, targets = batch()
        x = x.detach().float().requires_grad_()
        torch._dynamo.reset()
        graphs.clear()
        compiled = torch.compile(module.loss_sum, dynamic=False, fullgraph=True, backend=count)
        for value in (0.25, 0.1):
            loss = LossTensors(torch.tensor([1.0, value]), torch.tensor(value))
            results = [f(x, targets, None, loss) for f in (module.loss_sum, compiled)]
            torch.testing.assert_close(results[1], results[0])
            slopes = [torch.autograd.grad(r, x)[0] for r in results]
            torch.testing.assert_close(slopes[1], slopes[0])
        assert len(graphs) == 1


def test_which_loss_a_run_takes():
    cpu = torch.device("cpu")
    execution = Execution(device="cpu", compute="bf16", attention="sdpa", compile="off")
    fp8 = load_recipe("tiny", {"precision.fp8_head": "{}"})
    assert build_state(load_recipe("tiny"), execution, 0, cpu).model.head.train_loss is None
    model = build_state(fp8, execution, 0, cpu).model
    assert model.head.train_loss.keywords["scales"] == Fp8Scales(1 / 2, 1 / 512, 1 / 448)
    off = Execution(device="cpu", compute="bf16", attention="sdpa", compile="off", fp8="off")
    assert build_state(fp8, off, 0, cpu).model.head.train_loss is None
    with pytest.raises(ValueError, match="fp64"):
        load_recipe("tiny", {"precision.fp8_head": "{}", "precision.compute": "fp64"})
