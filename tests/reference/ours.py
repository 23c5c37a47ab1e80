"""The recipe `record` at the reference's sizes, and its parameters from the reference's."""

import torch

from tests.reference import record as reference

DIMS = reference.reduced_dims()
H = DIMS["H"]
# The columns of each net in the order in which our modules ask for them; the reference's order is PUBLISHED's.
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


def overrides(longest: int) -> dict:
    """The recipe's settings at the reference's sizes, for rows of up to `longest` tokens; token 0 starts a document."""
    return {
        "model.dim": DIMS["D"],
        "model.num_heads": H,
        "model.vocab_size": DIMS["V"],
        "model.seq_len": longest,
        "train.batch_tokens": 8 * longest,
        "model.document_start": 0,
        "model.bigram": {"rows": DIMS["R"], "signs": DIMS["S"]},
        "model.layers.10.mixer.compose.window": DIMS["dc"],
        **{f"model.nets.{i}.hidden": DIMS["G"] for i in range(4)},
        "eval.seq_len": longest,
    }


def load(model, params):
    """Give the model the reference's parameters, signs and prefixes."""
    own = ours_from(params)
    assert own.keys() == dict(model.named_parameters()).keys()
    model.load_state_dict({**model.state_dict(), **own, "bigram.signs": params["signs"]})
    model.set_prefixes(params["prefix"])
