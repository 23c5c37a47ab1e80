"""The ladder: milestones of the NanoGPT speedrun on the way from GPT-2, each its parent plus a diff.

Source: KellerJordan/modded-nanogpt, the records named below, with the numbers of their logs on 8 H100s.
"""

from dataclasses import replace

from nanosprint.config import (
    AdamConfig,
    AttnSpec,
    InitSpec,
    LayerSpec,
    LRSchedule,
    MLPSpec,
    MomentumSchedule,
    MuonConfig,
    ParamGroup,
    Recipe,
    RotarySpec,
    Schedule,
    SoapConfig,
    SoftcapSpec,
)
from nanosprint.recipes import Dials, recipe

ADAM = AdamConfig(betas=(0.9, 0.95), eps=1e-8)


@recipe("gpt2-rotary", parent="gpt2", summary="record #2: higher rate, trapezoid, rotary, no biases; 31.4 min")
def gpt2_rotary(parent: Recipe, dials: Dials) -> Recipe:
    layer = LayerSpec(mixer=AttnSpec(), mlp=MLPSpec(hidden=4 * dials.dim, activation="gelu"))
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
            attn_branch_scale=(2 * dials.num_layers) ** -0.5,
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
            attn_branch_scale=1.0,
            init=replace(parent.model.init, projections="zero"),
        ),
        train=replace(parent.train, num_steps=5100),
        schedule=Schedule(lr=LRSchedule(cooldown_steps=1450)),
    )


@recipe("residuals", parent="modern", summary="record #9: untied head, value residual, x0 skip, softcap; 8.2 min")
def residuals(parent: Recipe, dials: Dials) -> Recipe:
    first, *rest = parent.model.layers
    mixing = tuple(replace(layer, mixer=AttnSpec(value_residual=True)) for layer in rest)
    return replace(
        parent,
        name="residuals",
        source="modded-nanogpt records #8 and #9: 3.2791 after 3,200 steps",
        model=replace(
            parent.model,
            layers=(first, *mixing),
            tied_head=False,
            embed_norm=True,
            x0_skip=True,
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
