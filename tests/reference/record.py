"""The NanoGPT speedrun's record model (#89) once more, slowly: what tests take for the truth.

Plain functions over a dict of tensors, written from the published description alone; nothing of nanosprint is
imported. All arithmetic has the parameters' dtype, float64 by default. Left out, because they only round: bf16
storage, the 16 extra bits of Muon's weights, FP8 and its scales. Sizes may shrink (`reduced_dims`), the wiring may not.

Letters: D width, H heads, d head width (D = H d), F inner width of the MLP, V vocabulary, R rows of the bigram table,
S rows of the sign table, G inner width of the gate nets, T tokens of one packed lane. Axes are named in that order.

Parameters, their place in the published banks, and what of a nanosprint model holds the same numbers. s(i) = i for
i < 6 and i - 1 for i > 6 is the attention slot of layer i; layer 6 has none.

here                      shape       published                                nanosprint
----                      -----       ---------                                ----------
head                      (D, V)      head W_h                                 head weight, head_layout="in_out"
embed                     (V, D)      embedding E                              embedding, head_copy=True
value.k, k = 0..4         (V, D)      value embeddings, rows kV : (k+1)V       source "table<k>"
bigram                    (R, D)      bigram table B                           BigramSpec.rows
qk.i, i != 6              (2D, D)     QK bank, H groups of 2d rows from        AttnSpec.separate_qk: rows [W_Q; W_K]
                                      group H s(i) on; W_Q over W_K
v.i, out.i, i != 6        (D, D)      VO bank 2 s(i), 2 s(i) + 1; (out, in)    value and output projections
up.i                      (F, D)      MLP bank [i, 0]; (out, in)               the MLP's first projection
down.i                    (F, D)      MLP bank [i, 1]; (in, out)               its second, down_layout="in_out"
qkv_scale.i, out_scale.i  ()          scalars 2i, 2i + 1                       AttnSpec.qkv_scale, .out_scale
smear_scale               ()          scalars 22                               SmearSpec.weight
skip_scale                ()          scalars 23, before the sigmoid           Scalar(sigmoid) of layer 6's skip from c3
rho_attn.i, rho_mlp.i     ()          residual lambdas [i, 0], [i, 1]          weight of "x" in after_mixer, after_mlp
pi_attn.i, pi_mlp.i       ()          post lambdas [i, 0], [i, 1]              weight of "mixer", of "mlp" there
smear_gate                (1, 12)     smear gate w_s                           SmearSpec.gate
ve_gate.i, i = 1,2,8,9    (H, 12)     VE gate bank, rows 0, 1, 2, 3            Gate on the layer's value table
gates.pre.w1, .post.w1    (G, D)      MUDD-gate G1 [0], [1]                    w1 of the nets fed by x0, by c3
gates.pre.w2, .bias       (3H+8, G)   G2, g [0], the first 26 of 41 outputs    w2, bias; outputs stand in the order in
gates.post.w2, .bias      (5H+11, G)  G2, g [1], all 41                        which the model asked: permute them
gates.scale               ()          MUDD-gate scale kappa_g                  shared_scale of both nets
mudd.layer.w1, .w2, .bias (14, G)     MUDD A1, A2, a [0]                       the net at the start of layer 10
mudd.last.w1, .w2, .bias  (5, G)      MUDD A1, A2, a [1], 5 of 14 outputs      the net in output_nets
signs (not trained)       (S, D)      sign table S                             BigramSpec.signs, a buffer
prefix (not trained)      (V,) int64  prefix table P                           GPT.set_prefixes

A bias has the first axis of its w2, a w1 is always (G, D). Published tensors hold more that no forward pass reads:
scalars 12 and 13, the other rho and pi, VE gate row 4, MLP 11, unused outputs, padding.
"""

import itertools
import math

import torch

EPS = 2.0**-23  # of every norm: the machine epsilon of fp32, whatever dtype computes
BUFFERS = ("signs", "prefix")
NUM_LAYERS = 11
SKIP_LAYER, DENSE_LAYER = 6, 10
GATE_READS = 12  # components that smear and value gates look at: 12, or 6 of each of two vectors

# The published layer table; the MLP is everywhere. "c7": attention reads the stream after layer 7 instead of x.
_COLUMNS = ("paired", "window", "table", "xsa", "head_gate", "offset", "c7")
_TABLE = {
    # paired  window  table  xsa  gate  offset  c7
    0: (True, "short", None, False, False, False, False),
    1: (False, "short", 0, True, False, False, False),
    2: (True, "short", 1, False, False, False, False),
    3: (False, "long", None, True, True, True, False),
    4: (False, "short", None, True, False, False, False),
    5: (True, "short", None, False, False, False, False),
    7: (False, "short", None, True, False, False, False),
    8: (False, "short", 2, False, False, False, True),
    9: (True, "short", 3, False, False, False, True),
    10: (False, "long", 4, False, True, True, True),
}
LAYERS = {i: dict(zip(_COLUMNS, row, strict=True)) for i, row in _TABLE.items()}
INJECTED_AFTER = (4, 5, 7, 8, 9)  # layers whose (alpha, beta) come from the second gate net, in its order

# First name -> learning-rate factor, decay factor, beta1, beta2.
ADAM = {
    "head": (1.0, 150.0, 0.5, 0.95),
    "embed": (1.0, 150.0, 0.5, 0.95),
    "value": (75.0, 5.0, 0.75, 0.95),
    "bigram": (75.0, 5.0, 0.75, 0.95),
    "qkv_scale": (5.0, 0.0, 0.9, 0.99),
    "out_scale": (5.0, 0.0, 0.9, 0.99),
    "smear_scale": (5.0, 0.0, 0.9, 0.99),
    "skip_scale": (5.0, 0.0, 0.9, 0.99),
    "rho_attn": (5.0, 0.0, 0.9, 0.95),
    "rho_mlp": (5.0, 0.0, 0.9, 0.95),
    "pi_attn": (1.0, 0.0, 0.9, 0.95),
    "pi_mlp": (1.0, 0.0, 0.9, 0.95),
    "smear_gate": (0.01, 0.0, 0.9, 0.99),
    "ve_gate": (1.0, 1.0, 0.9, 0.99),
    "mudd": (0.25, 1.0, 0.9, 0.99),
    "gates": (0.1, 1.0, 0.9, 0.99),
}
ADAM_LR, ADAM_EPS, ADAM_DECAY = 0.008, 1e-10, 0.005
MUON = ("qk", "v", "out", "up", "down")
MUON_LR, MUON_DECAY, MUON_BETA2 = 0.023, 1.2, 0.9
POLAR = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


# ---------------------------------------------------------------------------------------------------------------------
# Sizes and initial values
# ---------------------------------------------------------------------------------------------------------------------


def reduced_dims(**changes: int) -> dict[str, int]:
    """Sizes of a model that float64 on a CPU runs in a blink; `changes` replaces some. `dc` counts keys."""
    dims = {"D": 96, "H": 6, "d": 16, "F": 384, "V": 224, "R": 336, "S": 64, "G": 16, "dc": 7}
    unknown = set(changes) - set(dims)
    if unknown:
        raise ValueError(f"unknown sizes {sorted(unknown)}: expected some of {sorted(dims)}")
    dims.update(changes)
    if dims["D"] != dims["H"] * dims["d"] or dims["H"] % 2 or dims["d"] % 4 or dims["d"] < 8 or dims["D"] < GATE_READS:
        raise ValueError(f"sizes {dims}: need D = H d >= {GATE_READS}, H even, d >= 8 divisible by 4")
    return dims


def shapes(dims: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of everything a model holds, buffers included; the table above says what is what."""
    D, H, F, V, G = dims["D"], dims["H"], dims["F"], dims["V"], dims["G"]
    out: dict[str, tuple[int, ...]] = {"head": (D, V), "embed": (V, D), "bigram": (dims["R"], D)}
    for k in range(5):
        out[f"value.{k}"] = (V, D)
    for i in range(NUM_LAYERS):
        if i != SKIP_LAYER:
            out |= {f"qk.{i}": (2 * D, D), f"v.{i}": (D, D), f"out.{i}": (D, D)}
            out |= {f"qkv_scale.{i}": (), f"out_scale.{i}": ()}
        out |= {f"up.{i}": (F, D), f"down.{i}": (F, D)}
        if i not in (SKIP_LAYER, DENSE_LAYER):
            out |= {f"rho_attn.{i}": (), f"pi_attn.{i}": ()}
        if i != DENSE_LAYER:
            out |= {f"rho_mlp.{i}": (), f"pi_mlp.{i}": ()}
    out |= {"smear_scale": (), "skip_scale": (), "smear_gate": (1, GATE_READS)}
    for i in (1, 2, 8, 9):
        out[f"ve_gate.{i}"] = (H, GATE_READS)
    nets = {"gates.pre": 3 * H + 8, "gates.post": 5 * H + 11, "mudd.layer": 14, "mudd.last": 5}
    for net, outputs in nets.items():
        out |= {f"{net}.w1": (G, D), f"{net}.w2": (outputs, G), f"{net}.bias": (outputs,)}
    return out | {"gates.scale": (), "signs": (dims["S"], D), "prefix": (V,)}


def trainable(dims: dict[str, int]) -> list[str]:
    return [name for name in shapes(dims) if name not in BUFFERS]


def published_biases(dims: dict[str, int]) -> dict[str, list[float]]:
    """The biases of the four nets at the start, before their scale (0.1 in all of them)."""
    H = dims["H"]
    pairs = [0.0, 0.5]  # alpha (of x0), beta (of b)
    return {
        "gates.pre.bias": [0.0] * (2 * H) + [2.5] * H + pairs * 4,
        "gates.post.bias": [0.0] * (2 * H) + [2.5] * H + pairs * 5 + [5.0] + [10.0] * H + [0.0] * H,
        "mudd.layer.bias": [0.0] * 6 + [20.0, 20.0] + [10.488, 10.0] + [0.0, 0.5] + [10.488, 10.0],
        "mudd.last.bias": [0.0, -5.0, 0.0, 0.0, 0.0],
    }


def published_init(
    dims: dict[str, int], generator: torch.Generator, dtype: torch.dtype = torch.float64
) -> dict[str, torch.Tensor]:
    """Parameters as the record starts, formulas in D instead of 768. Prefixes are still unknown (-1)."""
    biases, bound = published_biases(dims), 0.5 * math.sqrt(3.0) * dims["D"] ** -0.5
    constant = {"qkv_scale": 0.5, "out_scale": 1.0, "smear_scale": 0.0, "skip_scale": -1.5, "gates.scale": 0.1}
    constant |= {"rho_attn": math.sqrt(1.1), "rho_mlp": math.sqrt(1.1), "pi_attn": 1.0, "pi_mlp": 1.0}
    params = {}
    for name, shape in shapes(dims).items():
        kind, value = name.split(".")[0], torch.zeros(shape, dtype=dtype)
        if kind in constant or name in constant:
            value += constant.get(name, constant.get(kind, 0.0))
        elif kind in ("qk", "v", "out", "up"):
            value.uniform_(-bound, bound, generator=generator)
        elif name.endswith(".w1"):
            value.uniform_(-(dims["D"] ** -0.5), dims["D"] ** -0.5, generator=generator)
        elif kind in ("head", "value"):
            value.normal_(0.0, 0.005 if kind == "head" else 0.01, generator=generator)
        elif name.endswith(".bias"):
            value = torch.tensor(biases[name], dtype=dtype)
        params[name] = value
    params["embed"] = params["head"].T.clone()
    params["signs"] = _random_signs(dims, generator, dtype)
    params["prefix"] = torch.full((dims["V"],), -1, dtype=torch.int64)
    return params


def init(
    dims: dict[str, int], generator: torch.Generator, dtype: torch.dtype = torch.float64
) -> dict[str, torch.Tensor]:
    """Random parameters under which every term counts; embed = head^T, half of the tokens have a prefix."""
    params = published_init(dims, generator, dtype)
    sd = {"head": 0.2, "bigram": 0.7, "value": 0.7, "smear_gate": 1.5, "ve_gate": 0.5}
    sd |= {"v": dims["D"] ** -0.5, "out": dims["D"] ** -0.5, "qk": dims["D"] ** -0.5, "up": dims["D"] ** -0.5}
    sd |= {"down": 0.5 * dims["F"] ** -0.5}
    # All but the first net read a stream that has grown: about alike in effect, and rounding errors stay small.
    outputs = {"gates.pre.w2": 3.0, "gates.post.w2": 1.0, "mudd.layer.w2": 0.5, "mudd.last.w2": 0.25}
    for name, shape in shapes(dims).items():
        if name in BUFFERS:
            continue
        kind, noise = name.split(".")[0], torch.randn(shape, generator=generator, dtype=dtype)
        if name.endswith(".w1"):
            params[name] = 1.5 * dims["D"] ** -0.5 * noise
        elif name.endswith(".w2"):
            params[name] = outputs[name] * dims["G"] ** -0.5 * noise
        elif name.endswith(".bias"):
            params[name] = params[name] + noise
        elif kind in sd:
            params[name] = sd[kind] * noise
        else:  # a single number
            params[name] = params[name] + (0.02 if name == "gates.scale" else 0.15) * noise
    params["smear_scale"] = params["smear_scale"] + 0.6
    params["embed"] = params["head"].T.clone()
    known = torch.randint(0, dims["V"], (dims["V"],), generator=generator)
    missing = torch.randint(0, 2, (dims["V"],), generator=generator) == 0
    params["prefix"] = torch.where(missing, torch.full_like(known, -1), known)
    return params


def _random_signs(dims: dict[str, int], generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    bits = torch.randint(0, 2, (dims["S"], dims["D"]), generator=generator)
    return (2 * bits - 1).to(dtype)


def random_lane(
    dims: dict[str, int],
    generator: torch.Generator,
    num_tokens: int,
    starts: list[int],
    *,
    slots: int = 0,
    bos: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Tokens (T,), targets (T,) and document boundaries of a lane whose documents start, with `bos`, at `starts`.

    Boundaries are padded with T, that is with empty documents, to `slots` entries. All other tokens differ from `bos`.
    """
    if not starts or starts[0] != 0 or sorted(starts) != starts or starts[-1] >= num_tokens:
        raise ValueError(f"starts {starts}: expected increasing positions from 0 on, below {num_tokens}")
    others = torch.randint(1, dims["V"], (num_tokens + 1,), generator=generator)
    packed = (bos + others) % dims["V"]
    packed[starts] = bos
    cu = [*starts, num_tokens]
    return packed[:-1].clone(), packed[1:].clone(), cu + [num_tokens] * (slots - len(cu))


def pack_lanes(
    stream: list[int], at: int, lanes: int, num_tokens: int, longest: int, bos: int
) -> tuple[list[tuple[torch.Tensor, torch.Tensor, list[int]]], int]:
    """`lanes` packed lanes of `num_tokens` from position `at` of a shard on, and the position behind them.

    Each lane takes documents from their BOS to the next, to `longest` tokens or until it has one token more than it
    reads; what is cut off is skipped. The last boundary is one less than the tokens taken.
    """
    out = []
    for _ in range(lanes):
        packed: list[int] = []
        cu = [0]
        while len(packed) < num_tokens + 1:
            at = stream.index(bos, at)
            end = at + 1
            while end < len(stream) and stream[end] != bos:
                end += 1
            taken = stream[at : min(end, at + longest, at + num_tokens + 1 - len(packed))]
            packed += taken
            cu.append(len(packed))
            at += len(taken)
        cu[-1] -= 1
        out.append((torch.tensor(packed[:-1]), torch.tensor(packed[1:]), cu))
    return out, at


# ---------------------------------------------------------------------------------------------------------------------
# Pieces of the model
# ---------------------------------------------------------------------------------------------------------------------


def norm(u: torch.Tensor) -> torch.Tensor:
    """u over its root mean square, along the last axis."""
    return u / torch.sqrt((u * u).mean(dim=-1, keepdim=True) + EPS)


def gelu(u: torch.Tensor) -> torch.Tensor:
    return 0.5 * u * (1.0 + torch.erf(u / math.sqrt(2.0)))


def small_net(params: dict[str, torch.Tensor], net: str, u_TD: torch.Tensor) -> torch.Tensor:
    """w2 gelu(w1 u) + bias for each token, not scaled yet: (T, outputs)."""
    hidden = gelu(u_TD @ params[f"{net}.w1"].T)
    return hidden @ params[f"{net}.w2"].T + params[f"{net}.bias"]


def smear(params: dict[str, torch.Tensor], e_TD: torch.Tensor) -> torch.Tensor:
    """Each raw embedding plus a share of the one before; the current token drives the gate."""
    gate_T1 = params["smear_scale"] * torch.sigmoid(e_TD[:, :GATE_READS] @ params["smear_gate"].T)
    return torch.cat([e_TD[:1], e_TD[1:] + gate_T1[1:] * e_TD[:-1]])


def wrap_int32(n: int) -> int:
    return (n + 2**31) % 2**32 - 2**31


def bigram_rows(tokens: list[int], rows: int) -> list[int]:
    """Row of the bigram table for each position, in the 32-bit arithmetic of the published code.

    Position 0 is overwritten with M = rows - 1 before position 1 is hashed, which so takes M for its predecessor.
    """
    last = rows - 1
    hashed = [last]
    for t in range(1, len(tokens)):
        before = last if t == 1 else tokens[t - 1]
        mixed = wrap_int32(36313 * tokens[t]) ^ wrap_int32(27191 * before)
        if mixed < 0:
            raise ValueError(f"tokens {before}, {tokens[t]} leave int32: the hash is defined for ids up to 59138")
        hashed.append(mixed % last)
    return hashed


def sign_rows(tokens: list[int], rows: int) -> list[int]:
    return [0] + [(tokens[t] ^ tokens[t - 1]) % rows for t in range(1, len(tokens))]


def bigram_source(params: dict[str, torch.Tensor], dims: dict[str, int], tokens_T: torch.Tensor) -> torch.Tensor:
    """b (T, D): hashed rows times signs. Pairs reach across documents."""
    tokens = tokens_T.tolist()
    rows_TD = params["bigram"][bigram_rows(tokens, dims["R"])]
    return rows_TD * params["signs"][sign_rows(tokens, dims["S"])]


def start_frequencies(dims: dict[str, int], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The d/4 angular frequencies, radians a position, of half-truncated rotary embedding: 1 down to 1/1024."""
    count = dims["d"] // 4
    return torch.tensor([1024.0 ** (-m / (count - 1)) for m in range(count)], dtype=dtype)


def yarn(freqs: torch.Tensor, scale: float, w_old: int, w_new: int) -> tuple[torch.Tensor, float]:
    """Frequencies and softmax scale after the long window went from `w_old` to `w_new` tokens."""
    changed = []
    for omega in freqs.tolist():
        turns = w_old * omega / (2.0 * math.pi)
        kept = min(max((turns - 1.0) / (32.0 - 1.0), 0.0), 1.0)
        changed.append(omega * (w_old / w_new + kept * (1.0 - w_old / w_new)))
    return torch.tensor(changed, dtype=freqs.dtype), scale * (1.0 + 0.2 * math.log(w_new / w_old))


def rotary_positions(num_tokens: int, num_heads: int, paired: bool) -> torch.Tensor:
    """Position (T, H) at which each head of each token is rotated: t, or in paired layers 2t and 2t + 1 (odd heads)."""
    if not paired:
        return torch.tensor([[t] * num_heads for t in range(num_tokens)])
    return torch.tensor([[2 * t + h % 2 for h in range(num_heads)] for t in range(num_tokens)])


def rotate(u_THd: torch.Tensor, positions_TH: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """Dimensions 2m and 2m + 1 turned clockwise by position * freqs[m]; the second half stands still."""
    out = u_THd.clone()
    for m in range(len(freqs)):
        angle_TH = positions_TH.to(u_THd.dtype) * freqs[m]
        cos, sin = torch.cos(angle_TH), torch.sin(angle_TH)
        first, second = u_THd[:, :, 2 * m], u_THd[:, :, 2 * m + 1]
        out[:, :, 2 * m] = cos * first + sin * second
        out[:, :, 2 * m + 1] = cos * second - sin * first
    return out


def offset_keys(k_THd: torch.Tensor) -> torch.Tensor:
    """The standing half of every key comes from the token before, across documents; position 0 keeps its own."""
    half = k_THd.shape[-1] // 2
    standing = torch.cat([k_THd[:1, :, half:], k_THd[:-1, :, half:]])
    return torch.cat([k_THd[:, :, :half], standing], dim=-1)


def probabilities(q_NHd: torch.Tensor, k_NHd: torch.Tensor, keys: int, scale: float) -> torch.Tensor:
    """Causal softmax (H, N, N) within one document, over at most `keys` keys, the query's own included."""
    n = q_NHd.shape[0]
    back = torch.arange(n)[:, None] - torch.arange(n)[None, :]
    allowed = (back >= 0) & (back < keys)
    scores_HNN = scale * torch.einsum("ihd,jhd->hij", q_NHd, k_NHd)
    return torch.softmax(scores_HNN.masked_fill(~allowed, -math.inf), dim=-1)


def attend(
    q_THd: torch.Tensor, k_THd: torch.Tensor, v_THd: torch.Tensor, cu: list[int], window: int, scale: float
) -> torch.Tensor:
    """Attention within documents; a query sees itself and `window` tokens before. (T, H, d)"""
    out = []
    for a, b in itertools.pairwise(cu):
        if a < b:
            p_HNN = probabilities(q_THd[a:b], k_THd[a:b], window + 1, scale)
            out.append(torch.einsum("hij,jhd->ihd", p_HNN, v_THd[a:b]))
    return torch.cat(out)


def interleave(u_THd: torch.Tensor) -> torch.Tensor:
    """(T, H, d) -> (2T, H/2, d): slot j holds head j at position 2t and head j + H/2 at position 2t + 1."""
    num_tokens, num_heads, width = u_THd.shape
    slots = num_heads // 2
    out = []
    for t in range(num_tokens):
        out.append(u_THd[t, :slots])
        out.append(u_THd[t, slots:])
    return torch.stack(out).reshape(2 * num_tokens, slots, width)


def attend_paired(
    q_THd: torch.Tensor, k_THd: torch.Tensor, v_THd: torch.Tensor, cu: list[int], window: int, scale: float
) -> torch.Tensor:
    """Heads j and j + H/2 share a softmax over 2T positions; the window still counts positions. (T, H, d)"""
    doubled = [2 * c for c in cu]
    y = attend(interleave(q_THd), interleave(k_THd), interleave(v_THd), doubled, window, scale)
    return torch.cat([y[0::2], y[1::2]], dim=1)


def compose(
    y_THd: torch.Tensor,
    q_THd: torch.Tensor,
    k_THd: torch.Tensor,
    v_THd: torch.Tensor,
    w1_TH: torch.Tensor,
    w2_TH: torch.Tensor,
    cu: list[int],
    keys: int,
    scale: float,
) -> torch.Tensor:
    """y plus the dynamically composed correction: w2 times (all heads' maps over `keys` keys, mixed by w1) times v."""
    w1_TH = w1_TH / torch.sqrt((w1_TH * w1_TH).mean(dim=1, keepdim=True) + 1e-6)
    out = []
    for a, b in itertools.pairwise(cu):
        if a < b:
            p_HNN = probabilities(q_THd[a:b], k_THd[a:b], keys, scale)
            mixed_NN = torch.einsum("ih,hij->ij", w1_TH[a:b], p_HNN)
            out.append(w2_TH[a:b, :, None] * torch.einsum("ij,jhd->ihd", mixed_NN, v_THd[a:b]))
    return y_THd + torch.cat(out)


def xsa(y_THd: torch.Tensor, v_THd: torch.Tensor, tau_TH: torch.Tensor) -> torch.Tensor:
    """y without the share tau of its component along the position's own value."""
    along = (y_THd * v_THd).sum(-1) / (v_THd * v_THd).sum(-1).clamp(min=1e-8)
    return y_THd - (tau_TH * along)[:, :, None] * v_THd


def attention_layer(
    params: dict[str, torch.Tensor],
    dims: dict[str, int],
    i: int,
    n_TD: torch.Tensor,
    aux_THd: torch.Tensor | None,
    gates: dict[str, torch.Tensor],
    cu: list[int],
    window: int,
    freqs: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention of layer i on its normed input, (T, D). `gates` (T, H) each: "xsa", "head", "w1", "w2" where used."""
    layer, D, H, d = LAYERS[i], dims["D"], dims["H"], dims["d"]
    num_tokens, s_in = n_TD.shape[0], params[f"qkv_scale.{i}"]
    q_THd = (n_TD @ (s_in * params[f"qk.{i}"][:D]).T).reshape(num_tokens, H, d)
    k_THd = (n_TD @ (s_in * params[f"qk.{i}"][D:]).T).reshape(num_tokens, H, d)
    v_THd = (n_TD @ (s_in * params[f"v.{i}"]).T).reshape(num_tokens, H, d)
    positions = rotary_positions(num_tokens, H, layer["paired"])
    q_THd = rotate(norm(q_THd), positions, freqs)
    k_THd = rotate(norm(k_THd), positions, freqs)
    if layer["offset"]:
        k_THd = offset_keys(k_THd)
    if aux_THd is not None:
        v_THd = v_THd + aux_THd
    y_THd = (attend_paired if layer["paired"] else attend)(q_THd, k_THd, v_THd, cu, window, scale)
    if i == DENSE_LAYER:
        y_THd = compose(y_THd, q_THd, k_THd, v_THd, gates["w1"], gates["w2"], cu, dims["dc"], scale)
    if layer["xsa"]:
        y_THd = xsa(y_THd, v_THd, torch.tanh(gates["xsa"]))
    if layer["head_gate"]:
        y_THd = y_THd * gates["head"][:, :, None]
    return y_THd.reshape(num_tokens, D) @ (params[f"out_scale.{i}"] * params[f"out.{i}"]).T


def mlp_layer(params: dict[str, torch.Tensor], i: int, n_TD: torch.Tensor) -> torch.Tensor:
    inner_TF = torch.relu(n_TD @ params[f"up.{i}"].T)
    return (inner_TF * inner_TF) @ params[f"down.{i}"]


def gated_values(
    params: dict[str, torch.Tensor], dims: dict[str, int], i: int, n_TD: torch.Tensor, ve_TD: torch.Tensor
) -> torch.Tensor:
    """The value table's rows times a gate for each head, (T, H, d), in layers 1, 2, 8, 9."""
    read = torch.cat([n_TD[:, : GATE_READS // 2], ve_TD[:, : GATE_READS // 2]], dim=1)
    gate_TH = 2.0 * torch.sigmoid(read @ params[f"ve_gate.{i}"].T)
    return gate_TH[:, :, None] * ve_TD.reshape(-1, dims["H"], dims["d"])


def named_gates(pre: torch.Tensor, post: torch.Tensor | None, H: int) -> dict[str, torch.Tensor]:
    """The outputs of the gate nets by use: (T, H), or (T, 1) for alpha.i (of x0), beta.i (of b) and the skip."""
    out = {"xsa.1": pre[:, :H], "xsa.3": pre[:, H : 2 * H], "head.3": pre[:, 2 * H : 3 * H]}
    for i in range(4):
        at = 3 * H + 2 * i
        out |= {f"alpha.{i}": pre[:, at : at + 1], f"beta.{i}": pre[:, at + 1 : at + 2]}
    if post is None:
        return out
    out |= {"xsa.4": post[:, :H], "xsa.7": post[:, H : 2 * H], "head.10": post[:, 2 * H : 3 * H]}
    for n, i in enumerate(INJECTED_AFTER):
        at = 3 * H + 2 * n
        out |= {f"alpha.{i}": post[:, at : at + 1], f"beta.{i}": post[:, at + 1 : at + 2]}
    at = 3 * H + 10
    out["skip"] = post[:, at : at + 1]
    out |= {"w1": post[:, at + 1 : at + 1 + H], "w2": post[:, at + 1 + H : at + 1 + 2 * H]}
    return out


# ---------------------------------------------------------------------------------------------------------------------
# The model
# ---------------------------------------------------------------------------------------------------------------------


def forward(
    params: dict[str, torch.Tensor],
    dims: dict[str, int],
    tokens_T: torch.Tensor,
    cu: list[int],
    windows: tuple[int, int],
    freqs: torch.Tensor,
    scale: float,
    trace: dict[str, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Final normed stream (T, D) and raw logits z (T, V), before `softcap`, of one packed lane.

    `cu` are document boundaries from 0 to T, repeats meaning empty documents; `windows` (short, long) in tokens.
    `trace` receives x0, b, c0, c3, c7, c9, all `named_gates`, attn.i, x.i (stream after layer i), mudd.layer, .last.
    """
    if cu[0] != 0 or cu[-1] != len(tokens_T) or sorted(cu) != list(cu):
        raise ValueError(f"cu={cu}: expected growing boundaries from 0 to the {len(tokens_T)} tokens")
    H, d, saved = dims["H"], dims["d"], {} if trace is None else trace
    reach = {"short": windows[0], "long": windows[1]}
    ve = [params[f"value.{k}"][tokens_T] for k in range(5)]

    x0 = norm(smear(params, params["embed"][tokens_T]))
    b = bigram_source(params, dims, tokens_T)
    kappa = params["gates.scale"]
    pre = kappa * small_net(params, "gates.pre", x0)
    gates = named_gates(pre, None, H)
    x = c0 = x0 + gates["beta.0"] * b
    c3 = c7 = x0  # replaced before use
    saved |= {"x0": x0, "b": b, "c0": c0}

    for i in range(DENSE_LAYER):
        if i == 4:
            gates = named_gates(pre, kappa * small_net(params, "gates.post", x), H)
        if i == SKIP_LAYER:
            x = x + torch.sigmoid(params["skip_scale"]) * gates["skip"] * c3
        else:
            layer = LAYERS[i]
            n = norm(c7 if layer["c7"] else x)
            aux = None if layer["table"] is None else gated_values(params, dims, i, n, ve[layer["table"]])
            mine = {use: gates[f"{use}.{i}"] for use in ("xsa", "head") if f"{use}.{i}" in gates}
            a = attention_layer(params, dims, i, n, aux, mine, cu, reach[layer["window"]], freqs, scale)
            x = params[f"rho_attn.{i}"] * x + params[f"pi_attn.{i}"] * a + gates[f"alpha.{i}"] * x0
            if i != 0:
                x = x + gates[f"beta.{i}"] * b
            saved[f"attn.{i}"] = a
        x = params[f"rho_mlp.{i}"] * x + params[f"pi_mlp.{i}"] * mlp_layer(params, i, norm(x))
        saved[f"x.{i}"] = x
        if i == 3:
            c3 = x
        if i == 7:
            c7 = x

    # Layer 10. Its coefficients see the raw stream; the value mix takes the stream from before the re-mix.
    c9 = x
    mu = 0.1 * small_net(params, "mudd.layer", x)
    m = [mu[:, j : j + 1] for j in range(14)]
    value_mix = m[0] * c0 + m[1] * c7 + m[2] * x
    x = (1.0 + m[5]) * x + m[3] * c0 + m[4] * c7
    gate_TH = torch.cat([m[6].expand(-1, H // 2), m[7].expand(-1, H // 2)], dim=1)
    aux = gate_TH[:, :, None] * ve[4].reshape(-1, H, d) + value_mix.reshape(-1, H, d)
    mine = {"head": gates["head.10"], "w1": gates["w1"], "w2": gates["w2"]}
    a = attention_layer(params, dims, 10, norm(c7), aux, mine, cu, reach["long"], freqs, scale)
    x = m[8] * x + m[9] * a + m[10] * c0 + m[11] * b
    x = m[12] * x + m[13] * mlp_layer(params, 10, norm(x))
    saved |= gates | {"c3": c3, "c7": c7, "c9": c9, "mudd.layer": mu, "attn.10": a, "x.10": x}

    # After the loop.
    mu = 0.1 * small_net(params, "mudd.last", x)
    m = [mu[:, j : j + 1] for j in range(5)]
    x = x + m[0] * c0 + m[1] * c7 + m[2] * c9 + m[3] * ve[0] + m[4] * c3
    saved["mudd.last"] = mu
    hidden = norm(x)
    return hidden, hidden @ params["head"]


def softcap(z: torch.Tensor) -> torch.Tensor:
    """The logits of the softmax, between 0 and 23."""
    return 23.0 * torch.sigmoid((z + 5.0) / 7.5)


# ---------------------------------------------------------------------------------------------------------------------
# Loss
# ---------------------------------------------------------------------------------------------------------------------


def loss_rows(
    z_TV: torch.Tensor, targets_T: torch.Tensor, w: list[float], omega: float, prefix_V: torch.Tensor
) -> torch.Tensor:
    """Training loss of each row (T,): targets k tokens ahead weigh w[k], the prefix of the next token omega."""
    logits, num_tokens = softcap(z_TV), z_TV.shape[0]
    lse_T = torch.logsumexp(logits, dim=-1)
    rows = []
    for t in range(num_tokens):
        row = torch.zeros((), dtype=z_TV.dtype)
        for k in range(len(w)):
            if t + k < num_tokens:
                row = row + w[k] * (lse_T[t] - logits[t, targets_T[t + k]])
        prefix = int(prefix_V[targets_T[t]])
        if prefix >= 0:
            row = row + omega * (lse_T[t] - logits[t, prefix])
        rows.append(row)
    return torch.stack(rows)


def loss(
    z_TV: torch.Tensor, targets_T: torch.Tensor, w: list[float], omega: float, prefix_V: torch.Tensor
) -> torch.Tensor:
    """The summed training loss; its autograd gradient is the exact one. Evaluation: w=[1], omega=0, over T."""
    return loss_rows(z_TV, targets_T, w, omega, prefix_V).sum()


def objective(
    z_TV: torch.Tensor, targets_T: torch.Tensor, w: list[float], omega: float, prefix_V: torch.Tensor
) -> torch.Tensor:
    """The value of `loss`, with the published gradient: the last rows push down as if all their targets existed."""
    num_tokens = z_TV.shape[0]
    lse_T = torch.logsumexp(softcap(z_TV), dim=-1)
    absent = torch.zeros((), dtype=z_TV.dtype)
    for t in range(num_tokens):
        for k in range(len(w)):
            if t + k >= num_tokens:
                absent = absent + w[k] * lse_T[t]
    return loss(z_TV, targets_T, w, omega, prefix_V) + (absent - absent.detach())


def dlogits(
    z_TV: torch.Tensor, targets_T: torch.Tensor, w: list[float], omega: float, prefix_V: torch.Tensor
) -> torch.Tensor:
    """The published gradient of `objective` with respect to z (T, V), written out."""
    num_tokens = z_TV.shape[0]
    u = torch.sigmoid((z_TV + 5.0) / 7.5)
    p = torch.softmax(23.0 * u, dim=-1)
    inner = torch.zeros_like(p)
    for t in range(num_tokens):
        prefix = int(prefix_V[targets_T[t]])
        inner[t] = (sum(w) + (omega if prefix >= 0 else 0.0)) * p[t]
        for k in range(len(w)):
            if t + k < num_tokens:
                inner[t, targets_T[t + k]] -= w[k]
        if prefix >= 0:
            inner[t, prefix] -= omega
    return (23.0 / 7.5) * u * (1.0 - u) * inner


def prefix_table(byte_strings: list[bytes | None]) -> torch.Tensor:
    """For each id the id of its longest proper prefix that is a token, else -1. None: a special or padding id."""
    ids = {text: i for i, text in enumerate(byte_strings) if text is not None}
    table = []
    for text in byte_strings:
        found = -1
        for length in range(1, len(text or b"")):
            found = ids.get(text[:length], found)
        table.append(found)
    return torch.tensor(table, dtype=torch.int64)


# ---------------------------------------------------------------------------------------------------------------------
# Optimizer
# ---------------------------------------------------------------------------------------------------------------------


def polar_express(u: torch.Tensor) -> torch.Tensor:
    """About the orthogonal factor of a matrix: singular values near 1."""
    x = u / (1.02 * torch.sqrt((u * u).sum()) + 1e-6)
    for a, b, c in POLAR:
        if x.shape[0] > x.shape[1]:
            y = x.T @ x
            x = a * x + x @ (b * y + c * y @ y)
        else:
            y = x @ x.T
            x = a * x + (b * y + c * y @ y) @ x
    return x


def even_out(x: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """NorMuon's variance step: (x of unchanged norm, new second moment). `s` (r, 1) if r >= c, else (1, c)."""
    axis = 1 if x.shape[0] >= x.shape[1] else 0
    q = (x * x).mean(dim=axis, keepdim=True)
    s = s + (1.0 - MUON_BETA2) * (q - s)
    flat = 1.0 / torch.sqrt(s.clamp(min=1e-10))
    n = x.shape[axis]
    before = torch.sqrt(n * q.sum())
    after = torch.sqrt((n * q * flat * flat).sum())
    return x * (flat * before / after.clamp(min=1e-10)), s


def muon_step(p: torch.Tensor, x: torch.Tensor, lr: float, factor: float) -> torch.Tensor:
    """Weight after a step of `lr * factor` along -x and cautious decay, where the step shrinks the weight or rests."""
    decayed = torch.where(x * p >= 0, p, torch.zeros_like(p))
    return p - MUON_DECAY * lr * (lr * factor) * decayed - lr * factor * x


def muon_layout(dims: dict[str, int], name: str) -> tuple[int, float]:
    """How many matrices a parameter stacks by rows, and the factor of their learning rate."""
    kind = name.split(".")[0]
    blocks = dims["H"] if kind == "qk" else 1  # pairs of heads: H/2 of queries, then H/2 of keys
    rows, columns = shapes(dims)[name]
    factor = math.sqrt(max(1.0, rows / blocks / columns))
    return blocks, 2.0 * factor if kind == "down" else factor


def muon_update(
    p: torch.Tensor, g: torch.Tensor, state: dict[str, torch.Tensor], lr: float, factor: float, momentum: float
) -> torch.Tensor:
    """One matrix after one NorMuon step. `lr` is 0.023 times the schedule. `state` {M, s} starts empty."""
    r, c = p.shape
    M = state.get("M", torch.zeros_like(p))
    s = state.get("s", torch.zeros((r, 1) if r >= c else (1, c), dtype=p.dtype))
    M = M + (1.0 - momentum) * (g - M)
    u = g + momentum * (M - g)
    x, s = even_out(polar_express(u), s)
    state.update(M=M, s=s)
    return muon_step(p, x, lr, factor)


def adam_rates(name: str) -> tuple[float, float, float, float]:
    """Learning-rate factor, decay factor, beta1, beta2. Biases and the gates' scale do not decay."""
    lr_mul, wd_mul, beta1, beta2 = ADAM[name.split(".")[0]]
    return lr_mul, 0.0 if name.endswith(".bias") or name == "gates.scale" else wd_mul, beta1, beta2


def adam_update(
    p: torch.Tensor, g: torch.Tensor, state: dict, lr: float, wd_mul: float, beta1: float, beta2: float
) -> torch.Tensor:
    """A parameter after one Adam step. `lr` = 0.008 * schedule * lr_mul. `state` {t, m, v} starts empty."""
    t = state.get("t", 0) + 1
    m = beta1 * state.get("m", torch.zeros_like(p)) + (1.0 - beta1) * g
    v = beta2 * state.get("v", torch.zeros_like(p)) + (1.0 - beta2) * g * g
    state.update(t=t, m=m, v=v)
    step = lr * (math.sqrt(1.0 - beta2**t) / (1.0 - beta1**t)) * m / (torch.sqrt(v) + ADAM_EPS)
    decayed = torch.where(step * p > 0, p, torch.zeros_like(p))
    return p - step - lr * lr * ADAM_DECAY * wd_mul * decayed


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------


def new_state() -> dict:
    """Before step 0: embedding tied to the head, nothing carried over from an even step."""
    return {"step": 0, "tied": True, "carried": {}, "muon": {}, "adam": {}}


def gradients(
    params: dict[str, torch.Tensor], dims: dict[str, int], lanes: list, schedule: dict
) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean over the lanes (published: 8) of their summed objectives, and its gradient for every trained parameter."""
    names = trainable(dims)
    leaves = {name: params[name].detach().clone().requires_grad_() for name in names}
    total = torch.zeros((), dtype=params["head"].dtype)
    for tokens_T, targets_T, cu in lanes:
        everything = params | leaves
        _, z = forward(everything, dims, tokens_T, cu, schedule["windows"], schedule["freqs"], schedule["scale"])
        total = total + objective(z, targets_T, schedule["w"], schedule["omega"], params["prefix"])
    total = total / len(lanes)
    grads = torch.autograd.grad(total, [leaves[name] for name in names])
    return total.item(), dict(zip(names, grads, strict=True))


def step_all(
    params: dict[str, torch.Tensor], state: dict, dims: dict[str, int], lanes: list, schedule: dict
) -> tuple[float, dict[str, torch.Tensor]]:
    """One optimizer step: (objective, gradients) before it. Replaces entries of `params` and `state`, not their values.

    In comparisons lr near 0.1 keeps rounding errors at 1e-10 for some steps; at 1 so small a model is chaotic.
    `lanes`: (tokens, targets, cu) each. `schedule`: lr (factor, 1 at the start), momentum, w, omega, windows, freqs,
    scale and, if wanted, split=True: after this step, an odd one, embedding and head go separate ways.
    """
    objective_value, grads = gradients(params, dims, lanes, schedule)
    for name, g in grads.items():
        if name.split(".")[0] in MUON:
            _muon_parameter(params, state, dims, name, g, schedule)
        else:
            state["carried"][name] = g + state["carried"].get(name, torch.zeros_like(g))
    if state["step"] % 2 == 1:
        _adam_parameters(params, state, schedule["lr"])
    if schedule.get("split", False):
        _split(state)
    state["step"] += 1
    return objective_value, grads


def _muon_parameter(
    params: dict[str, torch.Tensor], state: dict, dims: dict[str, int], name: str, g: torch.Tensor, schedule: dict
) -> None:
    blocks, factor = muon_layout(dims, name)
    lr, rows = MUON_LR * schedule["lr"], g.shape[0] // blocks
    done = []
    for n in range(blocks):
        mine, part = state["muon"].setdefault((name, n), {}), slice(n * rows, (n + 1) * rows)
        done.append(muon_update(params[name][part], g[part], mine, lr, factor, schedule["momentum"]))
    params[name] = torch.cat(done)


def _adam_parameters(params: dict[str, torch.Tensor], state: dict, factor: float) -> None:
    """Adam with the sum of two steps' gradients; while tied, the head's includes the embedding's."""
    carried, state["carried"] = state["carried"], {}
    if state["tied"]:
        carried["head"] = carried["head"] + carried.pop("embed").T
    for name, g in carried.items():
        lr_mul, wd_mul, beta1, beta2 = adam_rates(name)
        mine = state["adam"].setdefault(name, {})
        params[name] = adam_update(params[name], g, mine, ADAM_LR * factor * lr_mul, wd_mul, beta1, beta2)
    if state["tied"]:
        params["embed"] = params["head"].T.clone()


def _split(state: dict) -> None:
    if state["step"] % 2 == 0 or not state["tied"]:
        raise ValueError(f"split at step {state['step']}, tied={state['tied']}: it happens once, on an odd step")
    head = state["adam"]["head"]
    state["adam"]["embed"] = {"t": head["t"], "m": head["m"].T.clone(), "v": head["v"].T.clone()}
    state["tied"] = False
