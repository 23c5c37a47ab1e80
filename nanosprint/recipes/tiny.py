"""A few thousand parameters and a few seconds: for tests and for trying the program out."""

from dataclasses import replace

from nanosprint.config import (
    AdamConfig,
    AttnSpec,
    DataConfig,
    EvalConfig,
    LayerSpec,
    LRSchedule,
    MLPSpec,
    ModelConfig,
    MomentumSchedule,
    MuonConfig,
    ParamGroup,
    Precision,
    Recipe,
    Schedule,
    TrainConfig,
)
from nanosprint.recipes import Dials, recipe


@recipe(
    "tiny",
    summary="a toy of the modern kind, bytes of any text, for tests",
    dim=32,
    num_heads=2,
    num_layers=2,
    vocab_size=257,
    seq_len=32,
    batch_tokens=512,
    lanes=4,
)
def tiny(dials: Dials) -> Recipe:
    layer = LayerSpec(mixer=AttnSpec(), mlp=MLPSpec(hidden=4 * dials.dim))
    adam = AdamConfig(betas=(0.9, 0.95), eps=1e-10)
    return Recipe(
        name="tiny",
        source="for tests",
        model=ModelConfig(
            vocab_size=dials.vocab_size,
            dim=dials.dim,
            num_heads=dials.num_heads,
            seq_len=dials.seq_len,
            layers=(layer,) * dials.num_layers,
        ),
        data=DataConfig(name="tiny", tokenizer="bytes", epochs=100.0),
        train=TrainConfig(num_steps=20, batch_tokens=dials.batch_tokens, lanes=dials.lanes, log_every=1),
        schedule=Schedule(
            lr=LRSchedule(cooldown_steps=8, floor=0.1), momentum=MomentumSchedule(warmup_steps=10, cooldown_steps=0)
        ),
        groups=(
            ParamGroup(role="matrix", rule=MuonConfig(), lr=0.02),
            ParamGroup(role="embed", rule=adam, lr=0.1),
            ParamGroup(role="head", rule=adam, lr=0.01),
            ParamGroup(role="scalar", rule=adam, lr=0.02),
        ),
        precision=replace(Precision(), compute="fp32", orthogonalize="fp32"),
        eval=EvalConfig(tokens=2048, seq_len=dials.seq_len, every=10, batch_tokens=2048),
    )
