"""FlexAttention: a rule of what is visible, compiled into a Triton kernel (Dong et al. 2024, arXiv:2412.05496).

The kernel works on blocks of 128 queries by 128 keys and is told which of them are needed, and which need no mask. The
usual way to find out evaluates the rule for all S² pairs. Here a block of queries sees one unbroken run of keys, and
so one unbroken run of key blocks, wholly visible ones in its middle: O(S / 128) arithmetic on `first_key`, new for
every batch, in the same graph. In a compiled model, identical masks of several layers are computed once.

On a CPU there is no backward pass (PyTorch says so), and the forward pass needs a C++ compiler.
"""

import functools
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from nanosprint.ops.attention_backends.contract import Documents, Limit, Scale, check_inputs, first_key

_BLOCK = 128


def flex(
    q_BSHK: Tensor,
    k_BSHK: Tensor,
    v_BSHK: Tensor,
    scale: Scale,
    window: Limit | None,
    documents: Documents | None = None,
) -> Tensor:
    """Attention by FlexAttention, compiled whether or not the caller is. Head size >= 16, as many queries as keys."""
    check_inputs(q_BSHK, k_BSHK, v_BSHK, window, documents)
    if q_BSHK.size(1) != k_BSHK.size(1):
        raise ValueError(f"exec.attention=flex wants as many queries as keys, got {q_BSHK.size(1)}: use sdpa")
    call = _attend if torch.compiler.is_compiling() else _compiled()
    return call(q_BSHK, k_BSHK, v_BSHK, scale, window, documents)


def _attend(
    q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, scale: Scale, window: Limit | None, documents: Documents | None
) -> Tensor:
    mask = block_mask(first_key(k_BSHK.size(0), k_BSHK.size(1), window, documents, q_BSHK.device))
    q, k, v = (t.transpose(1, 2) for t in (q_BSHK, k_BSHK, v_BSHK))
    if isinstance(scale, Tensor):
        factor = scale.to(q.device, torch.float32, non_blocking=True)

        def scaled(score: Tensor, *_: Tensor) -> Tensor:
            return score * factor

        out: Tensor = flex_attention(q, k, v, scaled, block_mask=mask, scale=1.0)
    else:
        out = flex_attention(q, k, v, block_mask=mask, scale=scale)
    return out.transpose(1, 2)


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    # The making of the mask too: as some thirty launches of its own it took longer than attention to 128 keys.
    return cast(Callable[..., Tensor], torch.compile(_attend, dynamic=False, fullgraph=True))


def block_mask(first_BS: Tensor) -> BlockMask:
    """The blocks that keys first_BS[b, t] .. t of every query t touch. first_BS: int (B or 1, S), rising along S."""
    B, S = first_BS.shape
    blocks = torch.arange(-(-S // _BLOCK), device=first_BS.device)
    last_query = ((blocks + 1) * _BLOCK - 1).clamp_max(S - 1)
    # Query block i sees key blocks low[i] .. i; those from full[i] to i - 1 without exception.
    low = first_BS[:, blocks * _BLOCK] // _BLOCK
    full = torch.minimum((first_BS[:, last_query] + _BLOCK - 1) // _BLOCK, blocks)
    # The same read by key block j: query blocks j .. high[j] see some of it; j + 1 .. full_high[j] all of it.
    key_block = blocks.to(first_BS.dtype).expand(B, -1).contiguous()
    high = torch.searchsorted(low.contiguous(), key_block, right=True) - 1
    full_high = torch.searchsorted(full.contiguous(), key_block, right=True) - 1
    full_high = torch.maximum(full_high, blocks)

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        row = b if B > 1 else 0
        return (first_BS[row, query] <= key) & (key <= query)

    masked = _run(low, full - low, blocks, last_is=blocks)
    whole = _run(full, blocks - full, blocks)
    masked_back = _run(full_high, high - full_high, blocks, first_is=blocks)
    whole_back = _run(blocks + 1, full_high - blocks, blocks)
    return BlockMask(
        seq_lengths=(S, S),
        kv_num_blocks=masked[0],
        kv_indices=masked[1],
        full_kv_num_blocks=whole[0],
        full_kv_indices=whole[1],
        q_num_blocks=masked_back[0],
        q_indices=masked_back[1],
        full_q_num_blocks=whole_back[0],
        full_q_indices=whole_back[1],
        BLOCK_SIZE=(_BLOCK, _BLOCK),
        mask_mod=visible,
    )


def _run(
    start: Tensor, count: Tensor, blocks: Tensor, *, first_is: Tensor | None = None, last_is: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Numbers and lists of blocks in BlockMask's form: `count` from `start` on, and one more before or after them."""
    start, count = (t.expand(count.shape)[:, :, None] for t in (start, count))
    index = start + blocks
    if last_is is not None:
        index = torch.where(blocks == count, last_is[:, None], index)
    if first_is is not None:
        index = torch.where(blocks == 0, first_is[:, None], index)
    more = int(first_is is not None or last_is is not None)
    num_blocks = (count[:, None, :, 0] + more).to(torch.int32)
    return num_blocks, index[:, None].clamp(0, blocks.numel() - 1).to(torch.int32)
