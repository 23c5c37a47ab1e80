"""From the last residual stream to logits and the loss."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanosprint.config.model import ModelConfig, SoftcapSpec
from nanosprint.model.linear import init_linear, linear
from nanosprint.model.roles import Role

Linear = Callable[[Tensor, Tensor], Tensor]
NOT_SCORED = -1  # target of a position that does not count
_LOGITS_AT_ONCE = {True: 2**30, False: 2**26}  # in validation, on CUDA and elsewhere
_ALIGN = 64  # tensor cores want vocabulary columns in multiples of this


def softcap(logits: Tensor, spec: SoftcapSpec) -> Tensor:
    """Squash logits into a bounded range (Gemma 2, arXiv:2408.00118)."""
    if spec.kind == "tanh":
        return spec.cap * torch.tanh(logits / spec.cap)
    return spec.cap * torch.sigmoid((logits + spec.shift) / spec.width)


class Head(nn.Module):
    """Hidden states (B, S, D) -> logits (B, S, V). A tied head has no weight of its own and is handed the embedding.

    `train_linear` is the product (x, weight) -> logits of training, which may be in FP8; validation uses `linear`.
    """

    ROLES = {"weight": Role("head")}

    def __init__(self, config: ModelConfig, train_linear: Linear = linear) -> None:
        super().__init__()
        self.config, self.train_linear = config, train_linear
        self.weight = None if config.tied_head else nn.Parameter(torch.empty(config.vocab_size, config.dim))

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        if self.weight is None:
            return
        if self.config.init.head == "zero":
            self.weight.zero_()
        else:
            init_linear(self.weight, self.config.init, generator)

    def forward(self, x_BSD: Tensor, tied: Tensor) -> Tensor:
        """Logits in fp32, or wider if x is. `tied` is the embedding's table (V, D)."""
        return self._cap(linear(x_BSD, tied if self.weight is None else self.weight))

    def _cap(self, logits: Tensor) -> Tensor:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits if self.config.softcap is None else softcap(logits, self.config.softcap)

    def loss_sum(self, x_BSD: Tensor, targets_BS: Tensor, tied: Tensor) -> Tensor:
        """Cross-entropy in nats, summed over the targets that count (those not NOT_SCORED)."""
        x, targets = x_BSD.flatten(0, -2), targets_BS.flatten()
        if torch.is_grad_enabled():
            return self._loss_sum(x, targets, tied)
        # Validation may have rows far longer than training's: their logits are made a part at a time.
        chunk = max(1, _LOGITS_AT_ONCE[x.is_cuda] // self.config.vocab_size)
        parts = zip(x.split(chunk), targets.split(chunk), strict=True)
        return torch.stack([self._loss_sum(*part, tied) for part in parts]).sum()

    def _loss_sum(self, x_TD: Tensor, targets_T: Tensor, tied: Tensor) -> Tensor:
        weight = tied if self.weight is None else self.weight
        product = self.train_linear if torch.is_grad_enabled() else linear
        extra = -weight.size(0) % _ALIGN if x_TD.is_cuda or product is not linear else 0
        if not extra:
            logits = self._cap(product(x_TD, weight))
        else:
            # Rows of logits that start at odd addresses halve the speed of everything that reads them. The extra
            # columns are masked rather than cut off, which would bring the odd addresses back.
            logits = self._cap(product(x_TD, F.pad(weight.to(x_TD.dtype), (0, 0, 0, extra))))
            beyond = torch.arange(logits.size(-1), device=logits.device) >= weight.size(0)
            logits = logits.masked_fill(beyond, float("-inf"))
        return F.cross_entropy(logits, targets_T, ignore_index=NOT_SCORED, reduction="sum")
