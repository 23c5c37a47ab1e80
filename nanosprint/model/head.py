"""From the last residual stream to logits and the loss: `z = softcap(W norm(x))`, W the embedding or a matrix apart.

A head of its own may start at zero, so that the first prediction is uniform (speedrun record #8); tied to the
embedding, both learn from both gradients (Press & Wolf 2016, arXiv:1608.05859). On CUDA the vocabulary is padded to a
multiple of 64 columns that never count; ids beyond the tokenizer's that the recipe itself has do count (record #5).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanosprint.config.model import ModelConfig, SoftcapSpec
from nanosprint.model.context import LossTensors
from nanosprint.model.linear import init_linear
from nanosprint.model.objective import NOT_SCORED, labelled_loss, labels_of
from nanosprint.model.roles import Role
from nanosprint.model.sampled import draw
from nanosprint.ops.attention import Limit
from nanosprint.ops.softcap_xent import Labels

HeadLoss = Callable[..., Tensor]  # `ops.head_loss.head_loss`, its scales given or not
_LOGITS_AT_ONCE = {True: 2**30, False: 2**26}  # in validation, on CUDA and elsewhere
_ALIGN = 64  # tensor cores want vocabulary columns in multiples of this


def softcap(logits: Tensor, spec: SoftcapSpec) -> Tensor:
    """Squash logits into a bounded range (Gemma 2, arXiv:2408.00118)."""
    if spec.kind == "tanh":
        return spec.cap * torch.tanh(logits / spec.cap)
    return spec.cap * torch.sigmoid((logits + spec.shift) / spec.width)


class Head(nn.Module):
    """Hidden states (B, S, D) -> logits (B, S, V). A tied head has no weight of its own and is handed the embedding.

    The weight is (V, D), or (D, V) in the layout "in_out". `train_loss` computes product and loss of training in one
    operator; None leaves both to autograd. Validation is in the dtype of x always.
    """

    ROLES = {"weight": Role("head")}

    def __init__(self, config: ModelConfig, train_loss: HeadLoss | None = None) -> None:
        super().__init__()
        self.config, self.train_loss = config, train_loss
        self.in_out = config.head_layout == "in_out"
        shape = (config.dim, config.vocab_size) if self.in_out else (config.vocab_size, config.dim)
        self.weight = None if config.tied_head else nn.Parameter(torch.empty(shape))
        self.prefixes: Tensor
        # Not saved: it follows from the tokenizer alone.
        self.register_buffer("prefixes", torch.full((config.vocab_size,), NOT_SCORED), persistent=False)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        if self.weight is None:
            return
        init = self.config.init
        if init.head == "zero":
            self.weight.zero_()
        elif init.head == "normal":
            assert init.head_std is not None  # validated
            self.weight.normal_(0.0, init.head_std, generator=generator)
        else:  # by its fan-in, which is the width in either layout
            init_linear(self.weight.mT if self.in_out else self.weight, init, generator)

    @torch.no_grad()
    def set_prefixes(self, table: Tensor) -> None:
        """See `GPT.set_prefixes`. Raises ValueError for a table of another form."""
        V = len(self.prefixes)
        if table.ndim != 1 or len(table) > V or table.dtype != torch.int64 or (table >= V).any():
            raise ValueError(
                f"a table of prefixes of shape {tuple(table.shape)} and {table.dtype} does not fit a vocabulary of "
                f"{V}: expected int64 ids below {V}, one for each token, or -1"
            )
        self.prefixes.fill_(NOT_SCORED)
        self.prefixes[: len(table)] = table

    def forward(self, x_BSD: Tensor, tied: Tensor) -> Tensor:
        """Logits in fp32, or wider if x is. `tied` is the embedding's table (V, D)."""
        return self._cap(F.linear(x_BSD, self._weight_VD(tied).to(x_BSD.dtype)))

    def _weight_VD(self, tied: Tensor) -> Tensor:
        if self.weight is None:
            return tied
        return self.weight.mT if self.in_out else self.weight

    def _cap(self, logits: Tensor) -> Tensor:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits if self.config.softcap is None else softcap(logits, self.config.softcap)

    def loss_sum(
        self,
        x_BSD: Tensor,
        targets_BS: Tensor,
        tied: Tensor,
        loss: LossTensors | None = None,
        counts: Limit | None = None,
    ) -> Tensor:
        """Cross-entropy in nats, summed over the targets that count (those not NOT_SCORED); with `loss`, of those.

        counts: how often the weight's gradient counts; 0: it is zero and not computed. None: once.
        """
        x, targets = x_BSD.flatten(0, -2), targets_BS.flatten()
        wide = torch.promote_types(x.dtype, torch.float32)
        if torch.is_grad_enabled() and (self.train_loss is not None or loss is not None):
            return self._training_loss(x, labels_of(targets_BS, loss, self.prefixes, wide), tied, loss, counts)
        weight_VD = _counted(self._weight_VD(tied), counts)
        if loss is not None:
            return labelled_loss(self._logits(x, weight_VD), labels_of(targets_BS, loss, self.prefixes, wide))
        if torch.is_grad_enabled():
            return self._next_token(x, targets, weight_VD)
        # Validation may have rows far longer than training's: their logits are made a part at a time.
        chunk = max(1, _LOGITS_AT_ONCE[x.is_cuda] // self.config.vocab_size)
        parts = zip(x.split(chunk), targets.split(chunk), strict=True)
        return torch.stack([self._next_token(*part, weight_VD) for part in parts]).sum()

    def _training_loss(
        self, x_TD: Tensor, labels: Labels, tied: Tensor, loss: LossTensors | None, counts: Limit | None
    ) -> Tensor:
        columns = None
        if loss is not None and loss.sampled is not None:
            columns, labels = draw(labels, self.config.vocab_size, loss.sampled)
        if self.train_loss is None:
            logits = self._logits(x_TD, _counted(self._weight_VD(tied), counts))
            return labelled_loss(logits if columns is None else logits.index_select(-1, columns), labels)
        weight = tied if self.weight is None else self.weight
        options = {"softcap": self.config.softcap, "in_out": self.in_out, "columns": columns, "counts": counts}
        return self.train_loss(x_TD, weight, labels, **options)

    def _next_token(self, x_TD: Tensor, targets_T: Tensor, weight_VD: Tensor) -> Tensor:
        return F.cross_entropy(self._logits(x_TD, weight_VD), targets_T, ignore_index=NOT_SCORED, reduction="sum")

    def _logits(self, x_TD: Tensor, weight_VD: Tensor) -> Tensor:
        """Capped logits for the loss, on a GPU with columns of -inf up to a multiple of 64."""
        weight = weight_VD.to(x_TD.dtype)
        extra = -weight.size(0) % _ALIGN if x_TD.is_cuda else 0
        if not extra:
            return self._cap(F.linear(x_TD, weight))
        # Rows of logits that start at odd addresses halve the speed of everything that reads them. The extra columns
        # are masked rather than cut off, which would bring the odd addresses back.
        logits = self._cap(F.linear(x_TD, F.pad(weight, (0, 0, 0, extra))))
        beyond = torch.arange(logits.size(-1), device=logits.device) >= weight.size(0)
        return logits.masked_fill(beyond, float("-inf"))


def _counted(weight: Tensor, counts: Limit | None) -> Tensor:
    """The same numbers, whose gradient counts `counts` times."""
    if counts is None:
        return weight
    fixed = weight.detach()
    return fixed + counts * (weight - fixed)
