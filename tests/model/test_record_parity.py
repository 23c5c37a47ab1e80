"""The recipe `record` is the reference's model: loss and every gradient in float64, with all weights moved.

The reference (tests/reference/record.py) was written from the published description alone and shares no code with ours.
"""

import itertools

import pytest
import torch

from nanosprint.model.context import Context, LossTensors
from nanosprint.model.gpt import GPT
from nanosprint.ops.attention import Documents
from nanosprint.recipes import load_recipe
from tests.reference import record as reference
from tests.reference.ours import DIMS, load, ours_from, overrides

STARTS, LENGTH = [0, 5, 6, 21], 40
WINDOWS = (6, 13)


@pytest.fixture(scope="module")
def params():
    return reference.init(DIMS, torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model(params):
    model = GPT(load_recipe("record", overrides(48)).model, compute_dtype=torch.float64).double()
    load(model, params)
    return model


@pytest.mark.parametrize("long_windows", [(3,), (3, 7, 11)])
@pytest.mark.parametrize(("w", "omega"), [([1.0], 0.0), ([1.0, 0.5, 0.2], 0.25)])
def test_loss_and_gradients(model, params, long_windows, w, omega):
    tokens, targets, cu = reference.random_lane(DIMS, torch.Generator().manual_seed(1), LENGTH, STARTS, slots=8)
    freqs, scale = reference.start_frequencies(DIMS), 0.1
    for old, new in itertools.pairwise(long_windows):
        freqs, scale = reference.yarn(freqs, scale, old, new)
    schedule = {"windows": WINDOWS, "freqs": freqs, "scale": scale, "w": w, "omega": omega}
    expected, gradients = reference.gradients(params, DIMS, [(tokens, targets, cu)], schedule)

    factor = model.set_windows(long_windows)
    documents = Documents(torch.tensor(cu, dtype=torch.int32), LENGTH)
    loss = LossTensors(
        torch.tensor(w, dtype=torch.float64), torch.tensor(omega, dtype=torch.float64) if omega else None
    )
    context = Context(documents, *WINDOWS, attn_scale=0.1 * factor, loss=loss)
    model.zero_grad()
    got = model.loss_sum(tokens[None], targets[None], context)
    got.backward()

    assert got.item() == pytest.approx(expected, rel=1e-9)
    for name, gradient in ours_from(gradients).items():
        scale_of = float(gradient.abs().max())
        assert scale_of > 0, name
        torch.testing.assert_close(
            model.get_parameter(name).grad / scale_of,
            gradient / scale_of,
            rtol=0,
            atol=1e-6,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def test_evaluation(model, params):
    """The plain loss, over all ids of the vocabulary, with windows wider than rotary positions know of."""
    tokens, targets, _ = reference.random_lane(DIMS, torch.Generator().manual_seed(2), LENGTH, STARTS)
    cu, wide = [0, 0, 5, 6, 21, LENGTH, LENGTH], (6, 20)  # with the empty piece before the first start
    freqs, scale = reference.start_frequencies(DIMS), 0.1
    for old, new in itertools.pairwise((3, 7, 11, 13)):
        freqs, scale = reference.yarn(freqs, scale, old, new)
    _, z = reference.forward(params, DIMS, tokens, cu, wide, freqs, scale)
    expected = reference.loss(z, targets, [1.0], 0.0, params["prefix"]).item()
    factor = model.set_windows((3, 7, 11, 13))
    context = Context(Documents(torch.tensor(cu, dtype=torch.int32), LENGTH), *wide, attn_scale=0.1 * factor)
    with torch.no_grad():
        assert model.loss_sum(tokens[None], targets[None], context).item() == pytest.approx(expected, rel=1e-9)
