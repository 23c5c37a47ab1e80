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

DIMS = reference.reduced_dims()
H = DIMS["H"]
STARTS, LENGTH = [0, 5, 6, 21], 40
WINDOWS = (6, 13)
# The columns of each net in the order in which our modules ask for them; the reference's order is that of `_published`.
OURS = {
    "pre": ["b0", "a0", "xsa1", "a1", "b1", "a2", "b2", "xsa3", "head3", "a3", "b3"],
    "post": ["xsa4", "a4", "b4", "a5", "b5", "skip", "xsa7", "a7", "b7", "a8", "b8", "a9", "b9", "head10", "w1", "w2"],
    "mudd": [f"m{i}" for i in (5, 3, 4, 6, 7, 0, 1, 2, 8, 9, 10, 11, 12, 13)],
    "mudd_out": [f"o{i}" for i in range(5)],
}
PUBLISHED = {
    "pre": ["xsa1", "xsa3", "head3", "a0", "b0", "a1", "b1", "a2", "b2", "a3", "b3"],
    "post": ["xsa4", "xsa7", "head10", "a4", "b4", "a5", "b5", "a7", "b7", "a8", "b8", "a9", "b9", "skip", "w1", "w2"],
    "mudd": [f"m{i}" for i in range(14)],
    "mudd_out": [f"o{i}" for i in range(5)],
}
NETS = {"pre": "gates.pre", "post": "gates.post", "mudd": "mudd.layer", "mudd_out": "mudd.last"}


def places(net):
    """Where the reference has each of our outputs of a gate net."""

    def spread(labels):
        wide = ("xsa", "head", "w1", "w2")
        return [(label, h) for label in labels for h in range(H if label.startswith(wide) else 1)]

    published = spread(PUBLISHED[net])
    return [published.index(label) for label in spread(OURS[net])]


def ours_from(params):
    """Our parameters by name, from the reference's (or from gradients by the same names)."""
    out = {
        "embed.weight": params["embed"],
        "embed.smear.weight.value": params["smear_scale"],
        "embed.smear.gate.weight": params["smear_gate"],
        "bigram.weight": params["bigram"],
        "value_tables.weight": torch.cat([params[f"value.{k}"] for k in range(5)], dim=1),
        "head.weight": params["head"],
        "nets.gate_scale": params["gates.scale"],
        "layers.6.entry.weights.1.factors.0.value": params["skip_scale"],
    }
    for net, name in NETS.items():
        out[f"nets.nets.{net}.w1"] = params[f"{name}.w1"]
        out[f"nets.nets.{net}.w2"] = params[f"{name}.w2"][places(net)]
        out[f"nets.nets.{net}.bias"] = params[f"{name}.bias"][places(net)]
    for i in range(11):
        p = f"layers.{i}."
        out |= {f"{p}mlp.up": params[f"up.{i}"], f"{p}mlp.down": params[f"down.{i}"]}
        if i != 10:
            out |= {
                f"{p}after_mlp.weights.{n}.value": params[f"{kind}_mlp.{i}"] for n, kind in enumerate(("rho", "pi"))
            }
        if i == 6:
            continue
        out |= {f"{p}mixer.{ours}": params[f"{name}.{i}"] for ours, name in (("qk", "qk"), ("v", "v"), ("out", "out"))}
        out |= {f"{p}mixer.{name}.value": params[f"{name}.{i}"] for name in ("qkv_scale", "out_scale")}
        if i != 10:
            out |= {
                f"{p}after_mixer.weights.{n}.value": params[f"{kind}_attn.{i}"] for n, kind in enumerate(("rho", "pi"))
            }
        if i in (1, 2, 8, 9):
            out[f"{p}mixer.values.weights.1.weight"] = params[f"ve_gate.{i}"]
    return out


@pytest.fixture(scope="module")
def params():
    return reference.init(DIMS, torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model(params):
    overrides = {
        "model.dim": DIMS["D"],
        "model.num_heads": H,
        "model.vocab_size": DIMS["V"],
        "model.seq_len": 48,
        "train.batch_tokens": 8 * 48,
        "model.document_start": 0,
        "model.bigram": {"rows": DIMS["R"], "signs": DIMS["S"]},
        "model.layers.10.mixer.compose.window": DIMS["dc"],
        **{f"model.nets.{i}.hidden": DIMS["G"] for i in range(4)},
        "eval.seq_len": 48,
    }
    model = GPT(load_recipe("record", overrides).model, compute_dtype=torch.float64).double()
    model.load_state_dict({**model.state_dict(), **ours_from(params), "bigram.signs": params["signs"]})
    model.set_prefixes(params["prefix"])
    assert ours_from(params).keys() == dict(model.named_parameters()).keys()
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
