"""The recipe `record` in the formats it trains in stays near the reference's float64, both with weights as stored.

"Near" is a relative Frobenius norm: of the loss's logits, each row less its mean, since a constant changes no loss, and
of the gradients of each group of parameters taken together. Logits are within 2e-2 in all formats, gradients in bf16
(1e-2 at most). FP8 MLPs add up to 4e-2: E4M3 keeps three bits of what the groups read off the MLPs. An FP8 head adds
6e-2 to all of them alike: E5M2 keeps two bits of the logits' gradient, so that each entry is off by up to an eighth,
and where next to all targets have gradients of one size they are rounded in one direction.
"""

import pytest
import torch

from nanosprint.config import Execution
from nanosprint.config.groups import match_group
from nanosprint.model.context import Context, LossTensors
from nanosprint.model.roles import collect_roles
from nanosprint.ops.attention import Documents
from nanosprint.recipes import load_recipe
from nanosprint.training.setup import build_state
from tests.reference import record as reference
from tests.reference.ours import DIMS, load, ours_from, overrides

LANES, LENGTH, STARTS = 4, 48, [0, 9, 20, 33]
WINDOWS, WEIGHTS, OMEGA = (6, 13), [1.0, 0.5, 0.125], 0.25


def stored() -> dict[str, torch.Tensor]:
    """Weights on their way from the published start to random ones, rounded as they are stored.

    At the start many gradients are zero; at the end of the way the model multiplies rounding errors by a hundred.
    """
    first, last = (f(DIMS, torch.Generator().manual_seed(0)) for f in (reference.published_init, reference.init))
    params = {}
    for name, value in first.items():
        if name in reference.BUFFERS:
            params[name] = last[name]
        else:
            part = value + 0.3 * (last[name] - value)
            params[name] = part.to(torch.bfloat16 if part.ndim else torch.float32).double()
    params["embed"] = params["head"].T.clone()
    return params


@pytest.fixture(scope="module")
def truth():
    """(weights, lanes, loss, gradients, centred logits) of the reference."""
    params, g = stored(), torch.Generator().manual_seed(1)
    lanes = [reference.random_lane(DIMS, g, LENGTH, STARTS) for _ in range(LANES)]
    freqs = reference.start_frequencies(DIMS)
    schedule = {"windows": WINDOWS, "freqs": freqs, "scale": 0.1, "w": WEIGHTS, "omega": OMEGA}
    loss, gradients = reference.gradients(params, DIMS, lanes, schedule)
    logits = [reference.forward(params, DIMS, tokens, cu, WINDOWS, freqs, 0.1)[1] for tokens, _, cu in lanes]
    return params, lanes, loss, gradients, centred(reference.softcap(torch.stack(logits)))


def centred(logits):
    return logits - logits.mean(-1, keepdim=True)


def in_training_formats(params, settings):
    """Recipe and model as a run builds it on a CPU, which emulates FP8 products; gradients are views of bf16 banks."""
    recipe = load_recipe("record", {**overrides(LENGTH), **settings})
    execution = Execution(device="cpu", compute="bf16", attention="reference", compile="off")
    state = build_state(recipe, execution, 0, torch.device("cpu"))
    load(state.model, params)
    for name, wanted in ours_from(params).items():
        assert torch.equal(state.model.get_parameter(name).double(), wanted), f"{name} is stored in another format"
    state.model.refresh(0)
    return recipe, state.model


def batch(lanes):
    tokens, targets = (torch.stack([lane[i] for lane in lanes]) for i in (0, 1))
    ends = [0] + [n * LENGTH + end for n in range(LANES) for end in lanes[n][2][1:]]
    documents = Documents(torch.tensor(ends, dtype=torch.int32), LENGTH)
    loss = LossTensors(torch.tensor(WEIGHTS), torch.tensor(OMEGA))
    return tokens, targets, Context(documents, *WINDOWS, attn_scale=0.1, loss=loss)


NO_HEAD, NO_MLP = {"precision.fp8_head": "none"}, {"precision.fp8_mlp": "none"}


@pytest.mark.parametrize(("settings", "largest"), [(NO_HEAD | NO_MLP, 2e-2), (NO_HEAD, 6e-2), ({}, 0.12)])
def test_training_formats(truth, settings, largest):
    params, lanes, expected, gradients, logits = truth
    recipe, model = in_training_formats(params, settings)
    tokens, targets, context = batch(lanes)
    model.loss_sum(tokens, targets, context)  # the scales of activations in FP8 are those of the call before
    loss = model.loss_sum(tokens, targets, context)
    (loss / LANES).backward()
    assert loss.item() / LANES == pytest.approx(expected, rel=1e-3)

    with torch.enable_grad():  # FP8 MLPs where there are any
        got = centred(model.head(model.hidden(tokens, context), model.embed.weight).detach().double())
    assert (got - logits).norm() <= 2e-2 * logits.norm()

    roles, groups = collect_roles(model), {}
    for name, wanted in ours_from(gradients).items():
        role = match_group(roles[name].name, recipe.groups).role
        groups.setdefault(role, []).append((model.get_parameter(name).grad.double().flatten(), wanted.flatten()))
    assert len(groups) == len(recipe.groups)
    for role, pairs in groups.items():
        ours, theirs = (torch.cat(side) for side in zip(*pairs, strict=True))
        off = (ours - theirs).norm() / theirs.norm()
        assert off <= largest, f"{role}: gradients are off by {off:.1e}"
