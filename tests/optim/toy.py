"""A small model with every kind of parameter, for tests of the engine, and processes to train it in."""

import os
import socket
from dataclasses import replace
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from nanosprint.config import AdamConfig, MuonConfig, ParamGroup, Precision, SoapConfig
from nanosprint.config.schedule import StepPlan
from nanosprint.model.roles import Role, collect_roles
from nanosprint.optim import build, sharding
from nanosprint.optim.engine import Engine

LANES, LENGTH, VOCAB, DIM = 8, 5, 11, 6
EXACT = Precision(compute="fp64", orthogonalize="fp64")
ADAM = AdamConfig(betas=(0.8, 0.95), eps=1e-10, eps_form="uncorrected")
GROUPS = (
    ParamGroup(role="head", rule=ADAM, lr=0.02),
    ParamGroup(
        role="matrix",
        rule=MuonConfig(scale="rms", variance_beta=0.9, decay="cautious"),
        lr=0.02,
        weight_decay=0.5,
        lr_scale=2.0,
    ),
    ParamGroup(role="soap", rule=SoapConfig(refresh_every=2), lr=0.01),
    ParamGroup(role="embed", rule=ADAM, lr=0.05),
    ParamGroup(role="scalar", rule=replace(ADAM, decay="cautious"), lr=0.02, weight_decay=1.0),
)


class Toy(nn.Module):
    """Tokens (rows, LENGTH) -> the sum of losses that predict each row's own tokens."""

    ROLES = {
        "embed": Role("embed.token"),
        "qkv": Role("matrix.qkv", blocks=3),
        "proj": Role("matrix.proj"),
        "out": Role("matrix.proj"),
        "up": Role("soap"),
        "mid": Role("soap"),
        "down": Role("soap"),
        "gain": Role("scalar"),
        "scale": Role("scalar"),
        "head": Role("head"),
    }

    def __init__(self, head_layout="out_in"):
        super().__init__()
        g = torch.Generator().manual_seed(1)

        def parameter(*shape):
            return nn.Parameter(0.5 * torch.randn(shape, generator=g, dtype=torch.float64))

        self.embed, self.head = parameter(VOCAB, DIM), parameter(VOCAB, DIM)
        self.qkv, self.proj, self.out = parameter(3 * DIM, DIM), parameter(DIM, DIM), parameter(DIM, DIM)
        self.up, self.mid, self.down = (parameter(DIM, DIM) for _ in range(3))  # square: else SOAP has free choices
        self.gain, self.scale = parameter(DIM), parameter()
        self.head_layout = head_layout
        if head_layout == "in_out":
            self.head = nn.Parameter(self.head.detach().mT.contiguous())

    def loss_sum(self, tokens, skip=False):
        """`skip` leaves `out` without a gradient."""
        w = SimpleNamespace(**{name: p.to(self.scale.dtype) for name, p in self.named_parameters()})
        x = w.embed[tokens] * w.gain
        q, k, v = (x @ w.qkv.mT).chunk(3, -1)
        x = x + torch.tanh(q @ k.mT) @ v @ w.proj.mT
        x = x if skip else x + torch.tanh(x @ w.out.mT)
        x = x + torch.tanh(torch.tanh(x @ w.up.mT) @ w.mid.mT) @ w.down.mT
        logits = w.scale * (x @ (w.head if self.head_layout == "in_out" else w.head.mT))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="sum")


def plan(step, **options):
    return StepPlan(
        step=step, lr_factor=1 - step / 40, momentum=0.9, batch_tokens=LANES * LENGTH, seq_len=LENGTH, windows=None,
        **options,
    )  # fmt: skip


def toy(groups=GROUPS, dtype=torch.float64, **options):
    model = Toy(options.get("tied") or "out_in").to(dtype)
    return model, Engine(dict(model.named_parameters()), collect_roles(model), groups, EXACT, **options)


def train(
    model,
    engine,
    steps,
    lanes=2,
    grad_clip=None,
    skips=(),
    split_from=99,
    after=None,
    average=None,
    num_steps=None,
    ahead=None,
    ages=None,
):
    """Each process takes its share of the lanes, `lanes` at a time. Returns the losses of this process's share.

    skips: lanes that leave `out` alone. split_from: the first step whose plan splits. after(step) is called after each.
    average: what the plans of a run of `num_steps` say about the average of the weights. ahead(step), ages(step): their
    `ahead` and `ages`.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    losses = []
    for step in steps:
        about_average = average and average.step(step, num_steps)
        of_groups = {"ahead": ahead(step) if ahead else (), "ages": ages(step) if ages else ()}
        now = plan(step, split=step >= split_from, average=about_average, **of_groups)
        rows = torch.randint(VOCAB, (LANES, LENGTH), generator=torch.Generator().manual_seed(step))
        mine = list(range(LANES))[rank * LANES // size : (rank + 1) * LANES // size]
        total = 0.0
        for first in range(0, len(mine), lanes):
            some = mine[first : first + lanes]
            if first + lanes >= len(mine):
                engine.begin(now)
            loss = sum(model.loss_sum(rows[[i]], skip=i in skips) for i in some)
            (loss / now.batch_tokens).backward()
            total += loss.item()
        engine.step(now, grad_clip)
        losses.append(total)
        if after is not None:
            after(step)
    return losses


def differ(model, truth):
    """The largest difference of two models' parameters."""
    theirs = dict(truth.named_parameters())
    return max((p - theirs[n]).abs().max().item() for n, p in model.named_parameters())


def assert_same_bits(model):
    """Every process has the same parameters, bit for bit."""
    for name, p in model.named_parameters():
        first = p.detach().clone()
        dist.broadcast(first, src=0)
        assert torch.equal(first, p), f"process {dist.get_rank()} has another {name}"


def spawn(processes, function, *arguments):
    """function(*arguments) in several gloo processes, with banks cut from 40 numbers on and rows always sent."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    # Forked by a server that has imported torch: fresh processes would spend most of a short test's time on that.
    given = (processes, port, function, arguments)
    mp.start_processes(_start, args=given, nprocs=processes, start_method="forkserver")


def _start(rank, processes, port, function, arguments):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    build.REPLICATE_BELOW = 40
    sharding.SPARSE_BELOW = 2.0
    function(rank, processes, *arguments)


def join(rank, processes):
    """Join the process group: from here on engines are those of several processes."""
    dist.init_process_group("gloo", rank=rank, world_size=processes)
