"""What operators are timed on: the sizes of the record's step, and random data of its kind.

T tokens, D width, H heads of size K, F hidden units, V vocabulary. All data is made on the device, in bf16. It follows
from the `Sizes` and from what was drawn from them before. They have a generator of their own, since a recording of a
CUDA graph that fails may leave torch's own unusable.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from nanosprint.config.model import SoftcapSpec
from nanosprint.ops.attention_backends.contract import Documents
from nanosprint.ops.attention_backends.measure import sample_documents
from nanosprint.ops.fp8 import E4M3, E5M2, quantize, scale_of
from nanosprint.ops.head_loss import Fp8Scales
from nanosprint.ops.softcap_xent import Labels

CAP = SoftcapSpec(kind="sigmoid", cap=23.0, shift=5.0, width=7.5)
SCALES = Fp8Scales(x=100 / 448, weight=1.6 / 448, gradient=0.75 / 448)
LABEL_WEIGHTS = (1.0, 0.5, 0.25, 0.25)  # three tokens ahead and the prefix's, as in the record's first stage


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of the record, but for the number of tokens.

    pairs: rows of the table of hashed pairs. tables: value tables side by side. longest: tokens of a document at most.
    windows: tokens to the left that attention sees. compose_window: keys, the token itself included. banks: (matrices,
    rows, columns) that Muon orthogonalises together: Q and K of two heads, V and O, both of the MLP.
    """

    tokens: int
    device: str = "cuda"
    dim: int = 768
    heads: int = 6
    hidden: int = 3072
    vocab: int = 50_304
    pairs: int = 377_280
    tables: int = 5
    layers: int = 11
    longest: int = 2048
    windows: tuple[int, int] = (640, 1408)
    compose_window: int = 112
    banks: tuple[tuple[int, int, int], ...] = ((60, 256, 768), (20, 768, 768), (22, 3072, 768))

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @cached_property
    def generator(self) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(0)

    def random(self, *shape: int) -> Tensor:
        """Standard normal, bf16."""
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16, generator=self.generator)

    def leaf(self, *shape: int) -> Tensor:
        return self.random(*shape).requires_grad_()

    def ids(self, num: int) -> Tensor:
        """Uniformly random tokens."""
        return torch.randint(self.vocab, (num,), device=self.device, generator=self.generator)

    def text_ids(self, num: int) -> Tensor:
        """Tokens, the r-th most frequent with a share of 1/r, their numbers shuffled."""
        shares = 1 / torch.arange(1, self.vocab + 1, device=self.device)
        drawn = torch.multinomial(shares, num, replacement=True, generator=self.generator)
        return torch.randperm(self.vocab, device=self.device, generator=self.generator)[drawn]


def tiny(tokens: int = 96, device: str = "cpu") -> Sizes:
    """As small as every operator takes them, for a look at whether all is in order. FP8 wants multiples of 16."""
    return Sizes(
        tokens=tokens, device=device, dim=32, heads=2, hidden=64, vocab=128, pairs=160, tables=2, layers=2, longest=24,
        windows=(8, 16), compose_window=5, banks=((4, 16, 32), (2, 32, 32), (2, 64, 32)),
    )  # fmt: skip


def record_labels(targets: Tensor, num_labels: int) -> Labels:
    """The targets, and further labels as the record has them."""
    ids = torch.stack([targets.roll(-k) for k in range(num_labels)], 1)
    weights = torch.tensor(LABEL_WEIGHTS, device=targets.device)[:num_labels]
    return Labels(ids, weights, weights.sum().expand(len(ids)).contiguous())


class Heads(NamedTuple):
    """q, k, v of one row, leaves, the gradient of what attention makes of them, and where documents end."""

    leaves: tuple[Tensor, ...]
    grad: Tensor
    documents: Documents


def heads(sizes: Sizes, weights: int = 0) -> Heads:
    """(1, T, H, K) each; `weights` more leaves hold a number a head."""
    shape = (1, sizes.tokens, sizes.heads, sizes.head_dim)
    leaves = [sizes.leaf(*shape) for _ in range(3)] + [sizes.leaf(*shape[:3]) for _ in range(weights)]
    documents = sample_documents(1, sizes.tokens, sizes.longest, torch.device(sizes.device))
    return Heads(tuple(leaves), sizes.random(*shape), documents)


def first_documents(documents: Documents) -> tuple[int, Documents]:
    """How many tokens the first two documents have, and those two: what they attend to is a case of its own."""
    ends = documents.cu_seqlens[:3]
    return int(ends[-1]), Documents(ends, documents.max_seq_len)


class Projected(NamedTuple):
    """The merged projection (1, T, 3D), a leaf, tables of positions (T, P), gradients of q, k and v."""

    qkv: Tensor
    cos: Tensor
    sin: Tensor
    grads: tuple[Tensor, ...]


def projected(sizes: Sizes, together: int = 1) -> Projected:
    """As rotary positions take them, half of the pairs turning; `together` heads with angles of their own."""
    half = sizes.head_dim // 2
    angle = 6 * torch.rand(sizes.tokens, together * half, device=sizes.device, generator=sizes.generator)
    angle[:, torch.arange(together * half, device=sizes.device) % half >= half // 2] = 0
    grads = tuple(sizes.random(1, sizes.tokens, sizes.heads, sizes.head_dim) for _ in range(3))
    return Projected(sizes.leaf(1, sizes.tokens, 3 * sizes.dim), angle.cos(), angle.sin(), grads)


class Operands(NamedTuple):
    """Of a product of the MLP: A (T, D), B (F, D), what a code of 1 stands for in both; post (T, F) for a gradient.

    code_scale: that of what comes out. Scales are None in bf16.
    """

    A: Tensor
    B: Tensor
    scales: tuple[Tensor, Tensor] | None
    code_scale: Tensor | None
    post: Tensor | None


def mlp_operands(kind: str, sizes: Sizes) -> Operands:
    """kind: "up" or "dpre", in bf16; "up8" or "dpre8"."""
    forward, in_fp8 = kind.startswith("up"), kind.endswith("8")
    A, B = sizes.random(sizes.tokens, sizes.dim), sizes.random(sizes.hidden, sizes.dim) / sizes.dim**0.5
    post = None if forward else sizes.random(sizes.tokens, sizes.hidden).relu_().square_()
    if not in_fp8:
        return Operands(A, B, None, None, post)
    dtype = E4M3 if forward else E5M2
    scales = A.abs().amax().float() / torch.finfo(dtype).max, scale_of(B)
    codes = quantize(A, scales[0], dtype), quantize(B, scales[1], E4M3)
    return Operands(*codes, scales, torch.full((), 0.05, device=sizes.device), post)
