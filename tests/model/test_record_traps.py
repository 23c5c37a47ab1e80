"""Places where a plausible model is another than the record, and which few other tests would notice.

docs/traps.md lists all such places with their tests.
"""

import pytest
import torch

from nanosprint.model import attention
from nanosprint.model.context import Context, LossTensors
from nanosprint.model.gpt import GPT
from nanosprint.model.norm import build_norm, rms_norm
from nanosprint.recipes import load_recipe
from tests.reference import record as reference
from tests.reference.ours import DIMS, load, overrides


def record(dtype=torch.float64):
    model = GPT(load_recipe("record", overrides(16)).model, compute_dtype=dtype)
    model = model.double() if dtype == torch.float64 else model
    load(model, reference.init(DIMS, torch.Generator().manual_seed(0)))
    return model


@pytest.mark.parametrize("norm", [rms_norm, build_norm(load_recipe("record").model)])
def test_small_rows_in_bf16_get_unit_length(norm):
    """With the epsilon of bf16, 2^-7, embedding rows of deviation 0.005 would come out 18 times too small."""
    rows = (0.005 * torch.randn(50, 768, generator=torch.Generator().manual_seed(0))).bfloat16()
    assert norm(rows).float().square().mean(-1).sqrt().sub(1).abs().max() < 1e-2


def test_ids_that_no_text_has_count_in_the_softmax():
    """GPT-2 has 50,257; the rest of the columns get a gradient, and validation sees them too."""
    assert load_recipe("record").model.vocab_size == 50_304
    model, dead = record(), DIMS["V"] - 1
    tokens = torch.randint(dead, (1, 16), generator=torch.Generator().manual_seed(1))
    training = Context(short=6, long=13, loss=LossTensors(torch.tensor([1.0, 0.5])))
    model.loss_sum(tokens, tokens, training).backward()
    assert model.head.weight.grad[:, dead].abs().max() > 1e-3
    with torch.no_grad():
        before = model.loss_sum(tokens, tokens, Context(short=6, long=13))
        model.head.weight[:, dead] *= -1
        assert (model.loss_sum(tokens, tokens, Context(short=6, long=13)) - before).abs() > 1e-3


def test_scales_multiply_weights_and_not_activations(monkeypatch):
    """The same mathematics, but other roundings, which cost the published model loss."""
    model, seen, product = record(torch.bfloat16), [], attention.linear

    def linear(x, weight, bias=None):
        seen.append(weight.detach())
        return product(x, weight, bias)

    monkeypatch.setattr(attention, "linear", linear)
    model.hidden(torch.zeros(1, 16, dtype=torch.int64), Context(short=6, long=13))
    wanted = []
    for layer in (layer for layer in model.layers if getattr(layer, "mixer", None) is not None):
        m, weight = layer.mixer, layer.after_mixer.weights[1]  # of the mixer's output; in the last layer a column
        number = weight.value if hasattr(weight, "value") else torch.ones(())
        wanted += [m.qkv_scale.value * torch.cat([m.qk, m.v]), m.out_scale.value * number * m.out]
    assert len(seen) == len(wanted) == 20
    assert all(torch.equal(a, b) for a, b in zip(seen, wanted, strict=True))
