"""The ladder: milestones of the NanoGPT speedrun on the way from GPT-2, each its parent plus a diff.

Source: KellerJordan/modded-nanogpt, the records named below, with the numbers of their logs on 8 H100s.
"""

from dataclasses import replace

from nanosprint.config import (
    AdamConfig,
    AttnSpec,
    Fixed,
    Fp8HeadSpec,
    InitSpec,
    LayerSpec,
    LRSchedule,
    MLPSpec,
    MomentumSchedule,
    MuonConfig,
    ParamGroup,
    Recipe,
    RotarySpec,
    Scalar,
    Schedule,
    SoapConfig,
    SoftcapSpec,
    Term,
    WindowSchedule,
)
from nanosprint.recipes import Dials, recipe

ADAM = AdamConfig(betas=(0.9, 0.95), eps=1e-8)
X0_SKIP = (  # every layer is offered the embedding again (record #9)
    Term(source="x", weight=Scalar(init=1.0, role="entry")),
    Term(source="x0", weight=Scalar(init=0.0, role="entry")),
)


@recipe("gpt2-rotary", parent="gpt2", summary="record #2: higher rate, trapezoid, rotary, no biases; 31.4 min")
def gpt2_rotary(parent: Recipe, dials: Dials) -> Recipe:
    damped = Term(source="mixer", weight=Fixed(value=(2 * dials.num_layers) ** -0.5))
    layer = LayerSpec(
        mixer=AttnSpec(),
        mlp=MLPSpec(hidden=4 * dials.dim, activation="gelu"),
        after_mixer=(Term(source="x"), damped),
    )
    return replace(
        parent,
        name="gpt2-rotary",
        source="modded-nanogpt record #2: 3.2760 after 9,536 steps",
        model=replace(
            parent.model,
            layers=(layer,) * dials.num_layers,
            positions="rotary",
            rotary=RotarySpec(base=10_000.0),
            norm="rms",
            norm_eps=1e-6,
            bias=False,
            init=InitSpec(head="as_linear", projections="as_linear"),
        ),
        train=replace(parent.train, num_steps=9536, grad_clip=None),
        schedule=Schedule(lr=LRSchedule(warmup_steps=256, cooldown_steps=2048)),
        groups=(
            ParamGroup(role="matrix", rule=ADAM, lr=1.8e-3, weight_decay=0.1),
            ParamGroup(role="embed", rule=ADAM, lr=1.8e-3, weight_decay=0.1),
        ),
    )


@recipe("muon", parent="gpt2-rotary", summary="record #4: Muon on the matrices; 22.3 min")
def muon(parent: Recipe, dials: Dials) -> Recipe:
    return replace(
        parent,
        name="muon",
        source="modded-nanogpt record #4: 3.2785 after 6,200 steps; Muon: Jordan et al. 2024",
        train=replace(parent.train, num_steps=6200),
        schedule=Schedule(lr=LRSchedule(cooldown_steps=1800)),
        groups=(
            ParamGroup(role="matrix", rule=MuonConfig(scale="rms"), lr=3.6e-4),
            ParamGroup(role="embed", rule=ADAM, lr=3.6e-3),
        ),
    )


@recipe(
    "modern",
    parent="muon",
    summary="record #5: QK-norm, squared ReLU, zero projections, heads of 128; 15.2 min",
    num_heads=6,
    vocab_size=50_304,
)
def modern(parent: Recipe, dials: Dials) -> Recipe:
    layer = LayerSpec(mixer=AttnSpec(), mlp=MLPSpec(hidden=4 * dials.dim, activation="relu2"))
    return replace(
        parent,
        name="modern",
        source="modded-nanogpt record #5: 3.2741 after 5,100 steps",
        model=replace(
            parent.model,
            layers=(layer,) * dials.num_layers,
            qk_norm=True,
            init=replace(parent.model.init, projections="zero"),
        ),
        train=replace(parent.train, num_steps=5100),
        schedule=Schedule(lr=LRSchedule(cooldown_steps=1450)),
    )


@recipe("residuals", parent="modern", summary="record #9: untied head, value residual, x0 skip, softcap; 8.2 min")
def residuals(parent: Recipe, dials: Dials) -> Recipe:
    first, *rest = parent.model.layers
    mixing = tuple(replace(layer, mixer=AttnSpec(value_residual=True), entry=X0_SKIP) for layer in rest)
    return replace(
        parent,
        name="residuals",
        source="modded-nanogpt records #8 and #9: 3.2791 after 3,200 steps",
        model=replace(
            parent.model,
            layers=(replace(first, entry=X0_SKIP), *mixing),
            tied_head=False,
            embed_norm=True,
            softcap=SoftcapSpec(kind="tanh", cap=30.0),
            init=replace(parent.model.init, embed_std=1.0, head="zero"),
        ),
        train=replace(parent.train, num_steps=3200),
        schedule=Schedule(lr=LRSchedule(cooldown_steps=914), momentum=MomentumSchedule(warmup_steps=500)),
        groups=(
            ParamGroup(role="matrix", rule=MuonConfig(scale="spectral"), lr=0.02),
            ParamGroup(role="embed", rule=ADAM, lr=0.3),
            ParamGroup(role="head", rule=ADAM, lr=0.002),
            ParamGroup(role="scalar", rule=ADAM, lr=0.02),
        ),
    )


@recipe("soap", parent="residuals", summary="residuals with SOAP in place of Muon")
def soap(parent: Recipe, dials: Dials) -> Recipe:
    others = tuple(group for group in parent.groups if group.role != "matrix")
    return replace(
        parent,
        name="soap",
        source="SOAP: Vyas et al. 2024, arXiv:2409.11321, with the rate of its authors' speedrun fork",
        groups=(ParamGroup(role="matrix", rule=SoapConfig(), lr=1.8e-3), *others),
    )


@recipe(
    "longwindow",
    parent="residuals",
    summary="record #13: 64 K packed documents, sliding window that grows, U-net skips; 4.66 min",
    seq_len=65_536,
)
def longwindow(parent: Recipe, dials: Dials) -> Recipe:
    adam = replace(ADAM, betas=(0.8, 0.95))
    rates = {"embed": 0.6, "head": 0.008, "scalar": 0.04}
    windowed = [
        replace(layer, mixer=AttnSpec(window="long", value_residual=i > 0))
        for i, layer in enumerate(parent.model.layers)
    ]
    return replace(
        parent,
        name="longwindow",
        source="modded-nanogpt records #10 to #13: 3.2759 after 1,750 steps",
        model=replace(parent.model, layers=_unet(windowed), document_start=50_256),
        train=replace(parent.train, num_steps=1750),
        schedule=Schedule(
            lr=LRSchedule(cooldown_steps=640),
            momentum=MomentumSchedule(warmup_steps=300),
            windows=WindowSchedule(start=64, end=1792, block=64),
        ),
        groups=(
            ParamGroup(role="matrix", rule=MuonConfig(scale="spectral"), lr=0.05),
            *(ParamGroup(role=role, rule=adam, lr=lr) for role, lr in rates.items()),
        ),
    )


@recipe(
    "sub3",
    parent="longwindow",
    summary="record #21: value tables, long and short windows, half-truncated rotary, lr floor; 2.93 min",
    seq_len=49_152,
    batch_tokens=393_216,
)
def sub3(parent: Recipe, dials: Dials) -> Recipe:
    adam = AdamConfig(betas=(0.8, 0.95), eps=1e-10)
    return replace(
        parent,
        name="sub3",
        source="modded-nanogpt records #14 to #21: 3.2787 after 1,770 steps (n = 81)",
        model=replace(
            parent.model,
            layers=_unet([_sub3_layer(i, dials) for i in range(dials.num_layers)]),
            rotary=RotarySpec(base=1024.0, fraction=0.5),
            attn_scale=0.12,
            value_tables=min(3, dials.num_layers // 2),
            softcap=SoftcapSpec(kind="sigmoid", cap=30.0, width=7.5),
            init=replace(parent.model.init, linear_std=0.5),
        ),
        train=replace(parent.train, num_steps=1770),
        schedule=Schedule(
            lr=LRSchedule(cooldown_steps=708, floor=0.1),
            momentum=MomentumSchedule(warmup_steps=300),
            windows=WindowSchedule(start=0, end=1728, block=128, rounding="up", short_fraction=0.5),
        ),
        groups=tuple(g if g.role == "matrix" else replace(g, rule=adam) for g in parent.groups),
        precision=replace(parent.precision, fp8_head=Fp8HeadSpec()),
        eval=replace(parent.eval, seq_len=dials.seq_len * 16 // 3, batch_tokens=dials.seq_len * 16 // 3),
    )


def _unet(layers: list[LayerSpec]) -> tuple[LayerSpec, ...]:
    """The layers of the first half leave their outputs for those of the second, mirrored (U-net skips, record #11)."""
    half = len(layers) // 2
    down = [replace(layer, tap=f"down{i}") for i, layer in enumerate(layers[:half])]
    middle = layers[half : len(layers) - half]
    up = [
        replace(layer, join=(Term(source="x"), Term(source=f"down{i}", weight=Scalar(init=1.0, role="skip"))))
        for i, layer in zip(range(half)[::-1], layers[-half:], strict=True)
    ]
    return (*down, *middle, *up)


def _sub3_layer(i: int, dials: Dials) -> LayerSpec:
    """A layer of records #17 to #21, and what it stands for at other depths.

    Long windows in the outermost layers and in the last but one of each half, counted from outside; value tables in
    the three outermost on both sides, the same three; no attention in the second layer past the middle.
    """
    depth, half = dials.num_layers, dials.num_layers // 2
    mlp = MLPSpec(hidden=4 * dials.dim, activation="relu2")
    if half >= 3 and i == half + 1:
        return LayerSpec(mixer=None, mlp=mlp, entry=X0_SKIP)
    from_end, tables = min(i, depth - 1 - i), min(3, half)
    table = i if i < tables else i - (depth - tables)
    rows = Term(source=f"table{table}", weight=Scalar(init=0.5, role="table_weight"))
    mixer = AttnSpec(
        window="long" if from_end in (0, half - 2) else "short",
        values=(Term(source="v", weight=Scalar(init=0.5, role="value_scale")), *([rows] if from_end < tables else [])),
    )
    return LayerSpec(mixer=mixer, mlp=mlp, entry=X0_SKIP)
