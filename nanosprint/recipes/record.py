"""The upper end of the ladder: NorMuon, paired heads, and the current record of the NanoGPT speedrun.

Source: KellerJordan/modded-nanogpt, records #41, #59 and #89. Layers are written down as rows of a table, one for each
layer of the published model; at another depth the less important rows are left out, or plain ones repeated.
"""

from dataclasses import replace
from typing import Literal

from nanosprint.config import (
    AdamConfig,
    AttnSpec,
    BigramSpec,
    Column,
    ComposeSpec,
    Fp8HeadSpec,
    Fp8MLPSpec,
    Fp8ProjectionSpec,
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


def depth(dials: Dials, keep: tuple[int, ...], plain: tuple[int, ...]) -> list[int]:
    """Numbers of the published layers that stand in a model of `dials.num_layers`, in order.

    Fewer layers: the first of `keep`, which lists all by importance. More: those of `plain` come again in turn, right
    behind themselves.
    """
    more = dials.num_layers - len(keep)
    return sorted([*keep[: dials.num_layers], *(plain[i % len(plain)] for i in range(more))])


def kept_tables(tables: dict[int, int], rows: list[int]) -> list[int]:
    """The value tables that the layers kept look into, by their published numbers; a table's place is its new one."""
    return sorted({tables[row] for row in rows if row in tables})


def skip_weight(*factors: Column | Gate) -> Product:
    """A learned share of a tap, about 0.18 at first, times more factors."""
    return Product(factors=(Scalar(init=-1.5, role="skip", sigmoid=True), *factors))


def head_gate(dials: Dials) -> Gate:
    """What a head puts out is let through by half at first (record #28)."""
    return Gate(reads=(Read(source="n", dims=min(12, dials.dim)),), role="head")


# ------------------------------------------------------------------------------------------------- NorMuon, record #41

# Layers 1 .. 11 of the published model, whose layer 0 is empty, counted from 0 here.
_NORMUON_KEEP = (10, 0, 1, 8, 9, 4, 3, 6, 2, 7, 5)
_NORMUON_TABLES = {0: 1, 1: 2, 8: 0, 9: 1, 10: 2}


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
    rows = depth(dials, _NORMUON_KEEP, plain=(4, 5))
    tables = kept_tables(_NORMUON_TABLES, rows)
    layers = tuple(_normuon_layer(i, rows, tables, dials) for i in range(len(rows)))
    stages = tuple(
        Stage(batch_tokens=dials.batch_tokens, max_document=LONGEST, windows=windows(*blocks))
        for blocks in ((1, 3), (3, 7), (5, 11))
    )
    return replace(
        parent,
        name="normuon",
        source="modded-nanogpt records #22 to #41: 3.2784 after 2,315 steps (n = 20)",
        model=replace(
            parent.model,
            layers=layers,
            norm_eps=None,
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
        precision=replace(parent.precision, fp8_head=Fp8HeadSpec(x=768**0.5 / 448, weight=2.0**-9, gradient=1 / 448)),
        eval=replace(parent.eval, seq_len=dials.seq_len * 8, batch_tokens=dials.seq_len * 8),
    )


def _normuon_layer(i: int, rows: list[int], tables: list[int], dials: Dials) -> LayerSpec:
    """The i-th layer. The second half adds the outputs of the first, mirrored, the last layer aside."""
    row, last = rows[i], len(rows) - 1
    mirror = last - 1 - i
    values = [Term(source="v", weight=Scalar(init=0.5, role="value_scale"))]
    if row in _NORMUON_TABLES:
        table = f"table{tables.index(_NORMUON_TABLES[row])}"
        values.append(Term(source=table, weight=Scalar(init=0.5, role="table_weight")))
    mixer = AttnSpec(window="long" if row in (3, 10) else "short", values=tuple(values), head_gate=head_gate(dials))
    return LayerSpec(
        mixer=None if row == 6 else mixer,
        mlp=MLPSpec(hidden=4 * dials.dim),
        tap_in="middle" if i == first_after(7, rows) else None,
        join=(X, Term(source=f"down{mirror}", weight=skip_weight())) if mirror < i < last else (),
        entry=X0_SKIP,
        tap=f"down{i}" if i < mirror else None,
    )


# ----------------------------------------------------------------------------------------------- paired, record #59

_PAIRED_KEEP = (10, 3, 0, 6, 8, 9, 5, 2, 1, 7, 4)
_PAIRED_TABLES = {0: 1, 1: 2, 8: 0, 9: 1, 10: 2}


@recipe(
    "paired",
    parent="normuon",
    summary="record #59: paired heads, several tokens predicted, batch in stages, bf16 weights; 1.78 min",
    seq_len=49_152,
    batch_tokens=393_216,
)
def paired(parent: Recipe, dials: Dials) -> Recipe:
    rows = depth(dials, _PAIRED_KEEP, plain=(4, 5))
    tables = kept_tables(_PAIRED_TABLES, rows)
    return replace(
        parent,
        name="paired",
        source="modded-nanogpt records #42 to #59: 3.2787 after 1,775 steps (n = 5)",
        model=replace(
            parent.model,
            layers=tuple(_paired_layer(i, rows, tables, dials) for i in range(len(rows))),
            rotary=replace(parent.model.rotary, pairs="neighbours"),
            value_tables=len(tables),
            head_copy=True,
            softcap=SoftcapSpec(kind="sigmoid", cap=23.0, shift=5.0, width=7.5),
            init=InitSpec(linear_std=0.5, qkv_std=1.0, head="normal", head_std=0.005, value_table_std=0.0),
        ),
        train=replace(parent.train, num_steps=1775),
        schedule=Schedule(
            momentum=MomentumSchedule(warmup_steps=300, cooldown_steps=50),
            stages=StageSchedule(
                stages=stages(dials, first_document=LONGEST, prefix=0.0),
                extension=last_stage(dials),
                extension_steps=40,
                cooldown=0.5,
                floor=0.1,
                eval_windows=windows(6, 20),
                split_stage=2,
            ),
        ),
        groups=(
            *muon_groups(variance_beta=0.95),
            *table_groups(),
            adam("scalar", 5, 0, (0.9, 0.99)),
            adam("scalar.x0", 5, 0, (0.65, 0.95)),
            adam("gate", 1, 1, (0.9, 0.99)),
            adam("gate.skip", 0.05, 0, (0.9, 0.99)),
            adam("gate.smear", 0.01, 0, (0.9, 0.99)),
        ),
        precision=replace(parent.precision, fp8_head=Fp8HeadSpec(x=100 / 448, weight=1.6 / 448, gradient=0.75 / 448)),
        eval=replace(parent.eval, seq_len=dials.seq_len * 16 // 3, batch_tokens=dials.seq_len * 16 // 3),
    )


def stages(dials: Dials, first_document: int, prefix: float) -> tuple[Stage, ...]:
    """Three stages that grow in batch and windows, each with a token less to predict. (Records #46, #53, #88.)

    `first_document` cuts the first one's documents; `prefix` weighs the targets' prefixes until it fades in the second.
    """
    lane = dials.batch_tokens // dials.lanes
    return (
        Stage(
            batch_tokens=lane // 3 * dials.lanes,
            max_document=first_document,
            windows=windows(1, 3),
            loss=LossWeights(tokens=(1.0, 0.5, 0.25), prefix=prefix),
            loss_end=LossWeights(tokens=(1.0, 0.5, 0.0), prefix=prefix),
        ),
        Stage(
            batch_tokens=2 * lane // 3 * dials.lanes,
            max_document=LONGEST,
            windows=windows(3, 7),
            lr=1.52,  # about 2^0.6
            loss=LossWeights(tokens=(1.0, 0.5), prefix=prefix),
            loss_end=LossWeights(tokens=(1.0, 0.0)),
        ),
        Stage(
            batch_tokens=dials.batch_tokens,
            max_document=LONGEST,
            windows=windows(5, 11),
            lr=1.73,  # about 3^0.5
        ),
    )


def last_stage(dials: Dials) -> Stage:
    """The extension: a few steps with wider windows at the floor of the rate (record #35)."""
    return Stage(batch_tokens=dials.batch_tokens, max_document=LONGEST, windows=windows(6, 13))


def muon_groups(variance_beta: float) -> tuple[ParamGroup, ...]:
    """NorMuon on weights in bf16 whose other half the optimizer keeps; twice the rate for what leaves the MLP."""
    rule = MuonConfig(orthogonalizer="polar_express", variance_beta=variance_beta, decay="cautious")
    group = ParamGroup(role="matrix", rule=rule, lr=0.023, weight_decay=1.2, storage="bf16+16")
    return group, replace(group, role="matrix.mlp_down", lr_scale=2.0)


def adam(
    role: str,
    lr: float,
    decay: float,
    betas: tuple[float, float],
    *,
    storage: Literal["fp32", "bf16"] = "fp32",
    comm: Literal["replicate", "shard", "shard_sparse"] = "replicate",
) -> ParamGroup:
    """An Adam group whose rate and decay are multiples of the common ones; it moves on every second step."""
    rule = AdamConfig(betas=betas, eps=1e-10, eps_form="uncorrected", decay="cautious")
    return ParamGroup(
        role=role, rule=rule, lr=lr * ADAM_LR, weight_decay=decay * 0.005, storage=storage, comm=comm, every=2
    )


def table_groups() -> tuple[ParamGroup, ...]:
    """Head and embedding, and the tables whose rows are seen rarely: shorter memory, higher rates. (Record #57.)"""
    return (
        adam("head", 1, 150, (0.5, 0.95), storage="bf16", comm="shard"),
        adam("embed", 1, 150, (0.5, 0.95), storage="bf16", comm="shard"),
        adam("embed.value", 75, 5, (0.75, 0.95), storage="bf16", comm="shard"),
    )


def _paired_layer(i: int, rows: list[int], tables: list[int], dials: Dials) -> LayerSpec:
    row, dims = rows[i], min(12, dials.dim)
    entry = (
        Term(source="x", weight=Scalar(init=1.1, role="residual")),
        Term(source="x0", weight=Scalar(init=0.0, role="x0")),
    )
    if row == 6:
        gate = Gate(reads=(Read(source="x0", dims=dims),), role="skip", scale=2.0)
        return LayerSpec(
            mixer=None,
            mlp=_mlp(dials),
            join=(X, Term(source="third", weight=skip_weight(gate))) if 3 in rows else (),
            entry=entry,
        )
    values = [Term(source="v")]
    if row in _PAIRED_TABLES:
        gate = Gate(reads=(Read(source="n", dims=dims),), role="value", scale=2.0)
        values.append(Term(source=f"table{tables.index(_PAIRED_TABLES[row])}", weight=gate))
    quarter, long = dials.dim // dials.num_heads // 4, row in (3, 10)
    mixer = AttnSpec(
        window="long" if long else "short",
        values=tuple(values),
        qkv_scale=Scalar(init=0.5, role="qkv_scale"),
        out_scale=Scalar(init=1.0, role="out_scale"),
        paired=row in (0, 2, 5, 9),
        key_offset=((quarter, 2 * quarter), (3 * quarter, 4 * quarter)) if long else (),
        head_gate=head_gate(dials),
    )
    return LayerSpec(
        mixer=mixer,
        mlp=_mlp(dials),
        tap_in="middle" if i == first_after(7, rows) else None,
        entry=entry,
        tap="third" if row == 3 else None,
    )


def _mlp(dials: Dials) -> MLPSpec:
    return MLPSpec(hidden=4 * dials.dim, down_layout="in_out")


# ------------------------------------------------------------------------------------------------ the record, #89

_RECORD_KEEP = (10, 7, 3, 0, 8, 1, 6, 9, 2, 5, 4)
_RECORD_TABLES = {1: 0, 2: 1, 8: 2, 9: 3, 10: 4}
_FIRST = _RECORD_KEEP[:3]  # without these the sums of the record have nothing to add up


@recipe(
    "record",
    parent="paired",
    summary="record #89: MUDD connections, XSA, composed heads, hashed pairs, prefix loss, FP8 MLPs; 1.23 min",
)
def record(parent: Recipe, dials: Dials) -> Recipe:
    if dials.num_layers < len(_FIRST):
        raise ValueError(f"model.num_layers={dials.num_layers}: the record's connections want at least {len(_FIRST)}")
    rows = depth(dials, _RECORD_KEEP, plain=(4, 5))
    tables = kept_tables(_RECORD_TABLES, rows)
    slow = (0.9, 0.99)
    return replace(
        parent,
        name="record",
        source="modded-nanogpt records #60 to #89: 3.2785 after 1,285 steps (n = 13)",
        model=replace(
            parent.model,
            layers=tuple(_record_layer(i, rows, tables, dials) for i in range(len(rows))),
            value_tables=len(tables),
            nets=(
                GateNetSpec(name="pre", shared_scale="gate_scale"),
                GateNetSpec(name="post", shared_scale="gate_scale"),
                GateNetSpec(name="mudd"),
                GateNetSpec(name="mudd_out"),
            ),
            input_nets=("pre",),
            output_nets=("mudd_out",),
            input=(Term(source="x0"), column("bigram", "pre", 0.05)),
            output=(
                X,
                column("c0", "mudd_out"),
                column("c7", "mudd_out", -0.5),
                column("c9", "mudd_out"),
                column("table0", "mudd_out"),
                column("c3", "mudd_out"),
            ),
            bigram=BigramSpec(rows=dials.vocab_size * 15 // 2, signs=8192),
            head_layout="in_out",
            init=InitSpec(
                linear_std=0.5, head="normal", head_std=0.005, attn_projection="as_linear", value_table_std=0.01
            ),
        ),
        train=replace(parent.train, num_steps=1285),
        schedule=replace(
            parent.schedule,
            stages=StageSchedule(
                stages=stages(dials, first_document=896, prefix=0.25),
                extension=last_stage(dials),
                extension_steps=15,
                cooldown=0.6,
                floor=0.15,
                eval_windows=windows(6, 20),
                split_stage=2,
            ),
        ),
        groups=(
            *muon_groups(variance_beta=0.9),
            *table_groups(),
            adam("embed.bigram", 75, 5, (0.75, 0.95), storage="bf16", comm="shard_sparse"),
            adam("scalar", 5, 0, slow),
            adam("scalar.residual", 5, 0, (0.9, 0.95)),
            adam("scalar.post", 1, 0, (0.9, 0.95)),
            adam("gate.smear", 0.01, 0, slow, storage="bf16"),
            adam("gate.value", 1, 1, slow, storage="bf16"),
            *(
                adam(f"net.{net}{part}", lr, decay, slow, storage="bf16")
                for net, lr in (("pre", 0.1), ("post", 0.1), ("mudd", 0.25), ("mudd_out", 0.25))
                for part, decay in (("", 1), (".bias", 0))
            ),
            adam("net.gate_scale", 0.1, 0, slow),
        ),
        precision=replace(parent.precision, fp8_mlp=Fp8MLPSpec()),
    )


@recipe("record-third", parent="record", summary="the record's schedule in 313 steps, for data of 90 M tokens")
def record_third(parent: Recipe, dials: Dials) -> Recipe:
    assert parent.schedule.stages is not None
    return replace(
        parent,
        name="record-third",
        source="the record, its schedule cut to a quarter of the tokens",
        train=replace(parent.train, num_steps=313),
        schedule=replace(
            parent.schedule,
            momentum=MomentumSchedule(warmup_steps=73, cooldown_steps=12),
            stages=replace(parent.schedule.stages, extension_steps=7),
        ),
    )


@recipe(
    "fast",
    parent="record-third",
    summary="record-third's loss sooner: 9 layers, a quarter of its batch, FP8 in all but attention's weight gradients",
    num_layers=9,
    lanes=2,
    batch_tokens=98_304,
)
def fast(parent: Recipe, dials: Dials) -> Recipe:
    """The same learning rates in smaller steps of a model with two layers less (docs/speed.md: what each was worth)."""
    recipe = replace(
        parent,
        name="fast",
        source="record-third, 9 of its layers, a quarter of its batch, more products in FP8",
        precision=replace(
            parent.precision,
            fp8_mlp=Fp8MLPSpec(input="static", backward=True, weights=True),
            fp8_projections=Fp8ProjectionSpec(),
        ),
    )
    return recipe.with_num_steps(1000)


def column(source: str, net: str, init: float = 0.0, width: int | None = None) -> Term:
    """A source weighed per token by a gate net."""
    return Term(source=source, weight=Column(net=net, init=init, width=width))


def first_after(row: int, rows: list[int]) -> int:
    """The place of the first layer beyond a published one."""
    return next(i for i, other in enumerate(rows) if other > row)


def _record_layer(i: int, rows: list[int], tables: list[int], dials: Dials) -> LayerSpec:
    """The i-th layer; the numbers are those of the published model's layers."""
    row = rows[i]
    taps = {3: "c3", 7: "c7"}
    layer = LayerSpec(
        mixer=None if row == 6 else _record_attention(row, tables, dials),
        mlp=_mlp(dials),
        tap_in="c0" if i == 0 else None,
        nets=("post",) if i == first_after(3, rows) else (),
        reads="c7" if row > 7 else "x",
        tap=taps.get(row),
    )
    if row == 10:
        return _dense_connections(layer)
    if row == 6:
        gated = skip_weight(Column(net="post", init=0.5))
        return replace(layer, entry=(X, Term(source="c3", weight=gated)), after_mlp=_scaled("mlp"))
    net, pair = _net(row), column("bigram", _net(row), 0.05)
    return replace(
        layer,
        after_mixer=(*_scaled("mixer"), column("x0", net), *([pair] if i > 0 else [])),
        after_mlp=_scaled("mlp"),
    )


def _record_attention(row: int, tables: list[int], dials: Dials) -> AttnSpec:
    heads, dim = dials.dim // dials.num_heads, dials.dim
    values = [Term(source="v")]
    if row in _RECORD_TABLES and row != 10:
        table, dims = f"table{tables.index(_RECORD_TABLES[row])}", min(6, dim)
        reads = (Read(source="n", dims=dims), Read(source=table, dims=dims))
        values.append(Term(source=table, weight=Gate(reads=reads, role="value", scale=2.0)))
    if row == 10:
        values += [
            column(f"table{tables.index(_RECORD_TABLES[row])}", "mudd", 2.0, width=2),
            *(column(source, "mudd", width=1) for source in ("c0", "c7", "c9")),
        ]
    long = row in (3, 10)
    return AttnSpec(
        window="long" if long else "short",
        values=tuple(values),
        qkv_scale=Scalar(init=0.5, role="qkv_scale"),
        out_scale=Scalar(init=1.0, role="out_scale"),
        separate_qk=True,
        paired=row in (0, 2, 5, 9),
        key_offset=((heads // 2, heads),) if long else (),
        xsa=Column(net=_net(row)) if row in (1, 3, 4, 7) else None,
        head_gate=Column(net=_net(row), init=0.25) if long else None,
        compose=ComposeSpec(mix=Column(net="post", init=1.0), add=Column(net="post")) if row == 10 else None,
    )


def _net(row: int) -> str:
    """The gate net that a layer's columns come from: one looks at x0, the other at the stream after layer 3."""
    return "pre" if row <= 3 else "post"


def _scaled(output: str) -> tuple[Term, ...]:
    """The stream grows by a learned factor at each sub-layer, so that early ones count more at first (record #45)."""
    return (
        Term(source="x", weight=Scalar(init=1.1**0.5, role="residual")),
        Term(source=output, weight=Scalar(init=1.0, role="post")),
    )


def _dense_connections(layer: LayerSpec) -> LayerSpec:
    """The last layer: every weight in its sums is a column of one net (MUDD connections, record #81)."""
    return replace(
        layer,
        tap_in="c9",
        nets=(*layer.nets, "mudd"),
        entry=(X, column("x", "mudd"), column("c0", "mudd"), column("c7", "mudd")),
        after_mixer=(
            column("x", "mudd", 1.1**0.5),
            column("mixer", "mudd", 1.0),
            column("c0", "mudd"),
            column("bigram", "mudd", 0.05),
        ),
        after_mlp=(column("x", "mudd", 1.1**0.5), column("mlp", "mudd", 1.0)),
    )
