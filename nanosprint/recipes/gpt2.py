"""GPT-2 124M as llm.c trains it: the baseline of the speedrun (record #1, 45 minutes on 8 H100s).

Model: Radford et al. 2019. Training: Karpathy's llm.c (2024), whose settings follow Brown et al. 2020,
arXiv:2005.14165. On FineWeb it reaches 3.2722 after 19,560 steps.
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
    ParamGroup,
    Precision,
    Recipe,
    Schedule,
    TrainConfig,
)
from nanosprint.recipes import Dials, recipe

ADAM = AdamConfig(betas=(0.9, 0.95), eps=1e-8)


@recipe(
    "gpt2",
    summary="GPT-2 124M, AdamW, cosine: record #1, the baseline",
    dim=768,
    num_heads=12,
    num_layers=12,
    vocab_size=50_257,
    seq_len=1024,
    batch_tokens=524_288,
)
def gpt2(dials: Dials) -> Recipe:
    layer = LayerSpec(mixer=AttnSpec(), mlp=MLPSpec(hidden=4 * dials.dim, activation="gelu_tanh"))
    return Recipe(
        name="gpt2",
        source="llm.c, GPT-2 124M on FineWeb; modded-nanogpt record #1",
        model=ModelConfig(
            vocab_size=dials.vocab_size,
            dim=dials.dim,
            num_heads=dials.num_heads,
            seq_len=dials.seq_len,
            layers=(layer,) * dials.num_layers,
            positions="learned",
            norm="layernorm",
            norm_eps=1e-5,
            bias=True,
            qk_norm=False,
            tied_head=True,
            embed_norm=False,
            init=InitSpec(linear="normal", linear_std=0.02, embed_std=0.02, head="as_linear", projections="scaled"),
        ),
        data=DataConfig(name="fineweb10B"),
        train=TrainConfig(num_steps=19_560, batch_tokens=dials.batch_tokens, lanes=dials.lanes, grad_clip=1.0),
        schedule=Schedule(lr=LRSchedule(shape="cosine", warmup_steps=700, floor=0.0)),
        groups=(
            ParamGroup(role="matrix", rule=ADAM, lr=6e-4, weight_decay=0.1),
            ParamGroup(role="embed", rule=ADAM, lr=6e-4, weight_decay=0.1),
            ParamGroup(role="vector", rule=ADAM, lr=6e-4),  # gains and biases: tensors of one axis do not decay
        ),
        precision=Precision(compute="bf16"),
        eval=EvalConfig(tokens=10_485_760, seq_len=dials.seq_len, every=250),
    )
