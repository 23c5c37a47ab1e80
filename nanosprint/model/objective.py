"""Training's objective as labels: what each row of logits is scored against, and with which weights.

No extra heads are needed to predict several tokens: the same logits are scored against each of them (the speedrun's
record #53), and against the longest token that the target begins with (record #88).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanosprint.model.context import LossTensors
from nanosprint.ops.softcap_xent import Labels

NOT_SCORED = -1  # target of a position that does not count


def labels_of(
    targets_BS: Tensor, loss: LossTensors | None, prefixes: Tensor, dtype: torch.dtype = torch.float32
) -> Labels:
    """The labels of B rows of S targets, flattened to T = B S. prefixes: (V,) int64, -1 where a token has none.

    Targets shift within their row. Those beyond its end do not count in the loss, yet their weights do in the totals:
    the gradient of the record, which the last n - 1 tokens of a row follow. Targets of -1 count in neither. `dtype`:
    of weights and totals.
    """
    if loss is None:
        ones = torch.ones(1, dtype=dtype, device=targets_BS.device)
        return Labels(targets_BS.reshape(-1, 1), ones, (targets_BS >= 0).flatten().to(dtype))
    S = targets_BS.size(1)
    position = torch.arange(S, device=targets_BS.device)
    ids, counted = [], []
    for k in range(len(loss.tokens)):
        shift = min(k, S)
        ids.append(F.pad(targets_BS[:, shift:], (0, shift), value=NOT_SCORED))
        counted.append((ids[-1] >= 0) | (position >= S - shift))
    weights = loss.tokens.to(dtype)
    if loss.prefix is not None:
        ids.append(torch.where(targets_BS >= 0, prefixes[targets_BS.clamp(min=0)], NOT_SCORED))
        counted.append(ids[-1] >= 0)
        weights = torch.cat([weights, loss.prefix.to(dtype).reshape(1)])
    flat_ids, flat_counted = (torch.stack(t, -1).flatten(0, 1) for t in (ids, counted))
    return Labels(flat_ids, weights, _weigh(flat_counted, weights))


def labelled_loss(logits: Tensor, labels: Labels) -> Tensor:
    """The summed loss of logits (T, V), already capped, by autograd. See `ops.softcap_xent` for the formula.

    What the totals count beyond the loss enters as a term whose value is zero and whose gradient is not.
    """
    if labels.rest is not None:
        others = torch.arange(logits.size(-1), device=logits.device) >= labels.rest[0]
        logits = logits + torch.where(others, labels.rest[1], 0.0).to(logits.dtype)
    log_p = logits.log_softmax(-1)
    terms = [
        weight * F.nll_loss(log_p, ids, ignore_index=NOT_SCORED, reduction="sum")
        for ids, weight in zip(labels.ids.unbind(1), labels.weights.unbind(), strict=True)
    ]
    beyond = (labels.totals - _weigh(labels.ids >= 0, labels.weights)) * logits.logsumexp(-1)
    return torch.stack(terms).sum() + (beyond - beyond.detach()).sum()


def _weigh(mask_Tm: Tensor, weights_m: Tensor) -> Tensor:
    return (mask_Tm.to(weights_m.dtype) * weights_m).sum(-1)
