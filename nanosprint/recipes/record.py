"""The upper end of the ladder: NorMuon, paired heads, and the current record of the NanoGPT speedrun.

Source: KellerJordan/modded-nanogpt, records #41, #59 and #89. Layers are written down as rows of a table, one for each
layer of the published model; at another depth the less important rows are left out, or plain ones repeated.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from nanosprint.config import (
    AdamConfig,
    AttnSpec,
    BigramSpec,
    Column,
    ComposeSpec,
    DataConfig,
    Fp8HeadSpec,
    Fp8MLPSpec,
    Gate,
    GateNetSpec,
    InitSpec,
    LayerSpec,
    LossWeights,
    MLPSpec,
    MomentumSchedule,
    MuonConfig,
    ParamGroup,
    Product,
    Read,
    Recipe,
    RotarySpec,
    Scalar,
    Schedule,
    SmearSpec,
    SoftcapSpec,
    Stage,
    StageSchedule,
    Term,
    Windows,
)
from nanosprint.recipes import Dials, recipe
from nanosprint.recipes.ladder import X0_SKIP

BLOCK = 128  # tokens; windows are whole blocks
LONGEST = 2048  # tokens of a document that are trained on
ADAM_LR = 0.008
X = Term(source="x")


def windows(short: int, long: int) -> Windows:
    """Windows of so many blocks."""
    return Windows(short=BLOCK * short, long=BLOCK * long)


def smear(dials: Dials) -> SmearSpec:
    gate = Gate(reads=(Read(source="e", dims=min(12, dials.dim)),), role="smear")
    return SmearSpec(gate=gate, weight=Scalar(init=0.0, role="smear"))


def depth(dials: Dials, published: int, keep: tuple[int, ...], plain: tuple[int, ...]) -> list[int]:
    """Numbers of the published layers that stand in a model of `dials.num_layers`, in order.

    Fewer layers: the first of `keep`, which lists all layers by importance. More: those of `plain` come again in turn,
    right behind themselves.
    """
    count = dials.num_layers
    if count <= published:
        return sorted(keep[:count])
    return sorted([*range(published), *(plain[i % len(plain)] for i in range(count - published))])


# ------------------------------------------------------------------------------------------------- NorMuon, record #41

_NORMUON_KEEP = (10, 0, 1, 8, 9, 4, 3, 6, 2, 7, 5)  # slots 1 .. 11 of the published model, counted from 0


@recipe(
    "normuon",
    parent="sub3",
    summary="record #41: NorMuon, Polar Express, documents from their start, YaRN, smear, backout; 2.34 min",
    num_layers=11,
    seq_len=32_768,
    batch_tokens=262_144,
)
def normuon(parent: Recipe, dials: Dials) -> Recipe:
    adam = AdamConfig(betas=(0.65, 0.95), eps=1e-8)
    norm_muon = MuonConfig(orthogonalizer="polar_express", variance_beta=0.95)
    rows = depth(dials, 11, _NORMUON_KEEP, plain=(4, 5))
    tables = sorted({_normuon_table(row) for row in rows} - {None})
    layers = tuple(_normuon_layer(i, rows, tables, dials) for i in range(len(rows)))
    stage = {"batch_tokens": dials.batch_tokens, "max_document": LONGEST}
    stages = tuple(Stage(windows=windows(*blocks), **stage) for blocks in ((1, 3), (3, 7), (5, 11)))
    return replace(
        parent,
        name="normuon",
        source="modded-nanogpt records #22 to #41: 3.2784 after 2,315 steps (n = 20)",
        model=replace(
            parent.model,
            layers=layers,
            rotary=RotarySpec(base=1024.0, fraction=0.5, yarn=True),
            attn_scale=0.1,
            value_tables=len(tables),
            smear=smear(dials),
            output=(X, Term(source="middle", weight=Scalar(init=-0.5, role="backout"))),
        ),
        data=replace(parent.data, order="documents"),
        train=replace(parent.train, num_steps=2315, objective="lane_mean"),
        schedule=Schedule(
            momentum=MomentumSchedule(warmup_steps=300, cooldown_steps=50),
            stages=StageSchedule(
                stages=stages,
                extension=stages[-1],
                extension_steps=40,
                cooldown=0.45,
                floor=0.1,
                eval_windows=windows(6, 20),
            ),
        ),
        groups=(
            ParamGroup(role="matrix", rule=norm_muon, lr=0.06),
            # Published as (dim, hidden), which has no shape factor; ours is 2 for (hidden, dim).
            ParamGroup(role="matrix.mlp_up", rule=norm_muon, lr=0.06, lr_scale=0.5),
            ParamGroup(role="gate", rule=norm_muon, lr=0.06),
            ParamGroup(role="embed", rule=adam, lr=75 * ADAM_LR, every=2),
            ParamGroup(role="head", rule=adam, lr=ADAM_LR, every=2),
            ParamGroup(role="scalar", rule=adam, lr=5 * ADAM_LR, every=2),
        ),
        precision=replace(
            parent.precision, fp8_head=Fp8HeadSpec(x=768**0.5 / 448, weight=2.0**-9, gradient=1 / 448)
        ),
        eval=replace(parent.eval, seq_len=dials.seq_len * 8, batch_tokens=dials.seq_len * 8),
    )


def _normuon_table(row: int) -> int | None:
    """The value table of a layer: the same ones for the outermost layers of both ends."""
    return {0: 1, 1: 2, 8: 0, 9: 1, 10: 2}.get(row)


def _normuon_layer(i: int, rows: list[int], tables: list[int | None], dials: Dials) -> LayerSpec:
    """The i-th layer. Skips mirror the first layers onto the last but one; the middle has no attention."""
    row, last = rows[i], len(rows) - 1
    half = last // 2
    skip = last - 1 - i if half <= i < last else None
    table = _normuon_table(row)
    values = [Term(source="v", weight=Scalar(init=0.5, role="value_scale"))]
    if table is not None:
        values.append(Term(source=f"table{tables.index(table)}", weight=Scalar(init=0.5, role="table_weight")))
    mixer = AttnSpec(
        window="long" if row in (3, 10) else "short",
        values=tuple(values),
        head_gate=_head_gate(dials),
    )
    return LayerSpec(
        mixer=None if row == 6 else mixer,
        mlp=MLPSpec(hidden=4 * dials.dim),
        join=() if skip is None else (X, Term(source=f"down{skip}", weight=Scalar(init=-1.5, role="skip", sigmoid=True))),
        entry=X0_SKIP,
        tap=f"down{i}" if i < last - half else None,
    )
