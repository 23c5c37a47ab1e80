"""Characters of Shakespeare on a laptop: a minute of training on two CPU cores.

A small modern block (rotary, QK-norm, squared ReLU, Muon) fed by tables of hashed n-grams, which give each position
what came just before it without any arithmetic. Found by the experiments in docs/log.md.
"""

from nanosprint.config import (
    AdamConfig,
    AttnSpec,
    DataConfig,
    EvalConfig,
    InitSpec,
    LayerSpec,
    LRSchedule,
    MLPSpec,
    ModelConfig,
    MomentumSchedule,
    MuonConfig,
    NgramSpec,
    ParamGroup,
    Precision,
    Recipe,
    RotarySpec,
    RowAdagradConfig,
    Schedule,
    TrainConfig,
)
from nanosprint.recipes import Dials, recipe

ADAM = AdamConfig(betas=(0.9, 0.95), eps=1e-10)


@recipe(
    "shakespeare",
    summary="characters of Shakespeare's plays, a minute on two CPU cores",
    dim=128,
    num_heads=2,
    num_layers=2,
    vocab_size=73,
    seq_len=128,
    batch_tokens=4096,
    lanes=8,
)
def shakespeare(dials: Dials) -> Recipe:
    layer = LayerSpec(mixer=AttnSpec(), mlp=MLPSpec(hidden=2 * dials.dim))
    return Recipe(
        name="shakespeare",
        source="our own experiments, docs/log.md",
        model=ModelConfig(
            vocab_size=dials.vocab_size,
            dim=dials.dim,
            num_heads=dials.num_heads,
            seq_len=dials.seq_len,
            layers=(layer,) * dials.num_layers,
            rotary=RotarySpec(base=1000.0),
            embed_norm=False,
            ngrams=NgramSpec(orders=(2, 3, 4, 5, 6, 7, 8), rows=2**16),
            init=InitSpec(linear_std=0.5, embed_std=0.5),
        ),
        data=DataConfig(name="shakespeare", tokenizer="chars", order="shuffled"),
        train=TrainConfig(num_steps=600, batch_tokens=dials.batch_tokens, lanes=dials.lanes, checkpoint_minutes=2),
        schedule=Schedule(
            lr=LRSchedule(cooldown_steps=360),  # 60 % of the run
            momentum=MomentumSchedule(warmup_steps=75),
        ),
        groups=(
            ParamGroup(role="matrix", rule=MuonConfig(), lr=0.02),
            ParamGroup(role="embed", rule=ADAM, lr=0.02),
            ParamGroup(role="table", rule=RowAdagradConfig(power=0.4), lr=0.5),
            ParamGroup(role="head", rule=ADAM, lr=0.004),
            ParamGroup(role="scalar", rule=ADAM, lr=0.02),
        ),
        precision=Precision(compute="bf16"),
        eval=EvalConfig(seq_len=dials.seq_len, every=100, batch_tokens=8192),
    )
