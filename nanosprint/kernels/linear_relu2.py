"""A product with squared ReLU behind it, or with the derivative of squared ReLU, and what FP8 wants of the result.

    forward    post = relu(A B^T)^2              post again in E4M3, and its largest value
    backward   dpre = 2 sqrt(post) (A B^T)       dpre again in E5M2

A (T, K) and B (N, K) are bf16 or FP8 with scales. The elementwise part is done while a tile of the product is still in
registers: alone it would read and write T x N several times, which takes as long as the product does in FP8.

Blocks stay on their multiprocessor and take one tile after another, row by row. Two things keep the tensor cores busy
while a tile is being written: the loops over tiles and over K are flattened into one, so that the next tile's operands
are on their way (`flatten`); and small tiles leave room for two blocks, one of which multiplies while the other writes
(`blocks`). Tiles move through tensor descriptors, by Hopper's copy engine; other cards, and rows that are no multiple
of 16 bytes, take pointers and masks. Results leave in column parts, so that staging them takes less shared memory.

Each block keeps its own maximum and writes it to a slot of its own: no atomics, no order.

`relu2_pass` is the elementwise part alone, one pass over memory, in place: behind a product by cuBLAS.
(The speedrun's records #59, #84 and #87 fuse the same steps.)
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nanosprint.kernels.parts import FLOATS, larger, multiprocessors
from nanosprint.kernels.tuning import RELU2_PASS, RELU2_PEAKS, Persistent


@triton.jit
def _read(X, row, col, rows, cols, TMA: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Tile (R, C) of X (rows, cols) from `row`, `col` on; zeros outside."""
    if TMA:
        tile = X.load([row, col])
    else:
        r, c = row + tl.arange(0, R), col + tl.arange(0, C)
        inside = (r < rows)[:, None] & (c < cols)[None, :]
        tile = tl.load(X + r.to(tl.int64)[:, None] * cols + c[None, :], mask=inside, other=0.0)
    return tile


@triton.jit
def _write(X, tile, row, col, rows, cols, TMA: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    if TMA:
        X.store([row, col], tile)
    else:
        r, c = row + tl.arange(0, R), col + tl.arange(0, C)
        inside = (r < rows)[:, None] & (c < cols)[None, :]
        tl.store(X + r.to(tl.int64)[:, None] * cols + c[None, :], tile, mask=inside)


@triton.jit
def _relu2(pre):
    """Squared ReLU of values in the dtype of the result; the square is rounded once."""
    root = larger(pre.to(tl.float32), 0.0)
    return (root * root).to(pre.dtype)


@triton.jit
def _codes(x, inverse, LIMIT: tl.constexpr, DTYPE: tl.constexpr):
    """As `ops.fp8.quantize`."""
    return tl.clamp(x.to(tl.float32) * inverse, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL).to(DTYPE)


@triton.jit
def _inverse(scale):
    """1 / scale, rounded as torch rounds it, so that both agree on every code."""
    return tl.div_rn(1.0, tl.load(scale))


@triton.jit
def _finish(
    total, post, row, col, peak, inverse, OUT, OUT8, T, N, LIMIT: tl.constexpr, DTYPE: tl.constexpr,
    DTYPE8: tl.constexpr, BACKWARD: tl.constexpr, EMIT: tl.constexpr, TMA: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Write one column part of a tile; the running maxima of its rows."""
    if BACKWARD:
        result = (2.0 * tl.sqrt(post.to(tl.float32)) * total).to(DTYPE)
    else:
        result = _relu2(total.to(DTYPE))
        peak = larger(peak, tl.reduce(result.to(tl.float32), 1, larger))
    _write(OUT, result, row, col, T, N, TMA, R, C)
    if EMIT:
        _write(OUT8, _codes(result, inverse, LIMIT, DTYPE8), row, col, T, N, TMA, R, C)
    return peak


@triton.jit
def _write_peak(peaks, peak, BLOCKS: tl.constexpr, PEAKS: tl.constexpr):
    """This block's maximum to its slot; the first block clears those that have no block."""
    tl.store(peaks + tl.program_id(0), tl.reduce(peak, 0, larger))
    if tl.program_id(0) == 0:
        slots = tl.arange(0, PEAKS)
        tl.store(peaks + slots, tl.zeros([PEAKS], tl.float32), mask=slots >= BLOCKS)


@triton.jit(do_not_specialize=["T"])
def _relu2_product_kernel(
    A, B, POST, OUT, OUT8, peaks, a_scale, b_scale, out_scale, T,
    N: tl.constexpr, K: tl.constexpr, LIMIT: tl.constexpr, DTYPE: tl.constexpr, DTYPE8: tl.constexpr,
    SCALED: tl.constexpr, BACKWARD: tl.constexpr, EMIT: tl.constexpr, PEAK: tl.constexpr, TURN: tl.constexpr,
    TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
    FLATTEN: tl.constexpr, BLOCKS: tl.constexpr, PEAKS: tl.constexpr,
):  # fmt: skip
    """TURN: B is (K, N) in memory."""
    PART: tl.constexpr = BLOCK_N // PARTS
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tiles = tl.cdiv(T, BLOCK_M) * tiles_n
    scale = tl.load(a_scale) * tl.load(b_scale) if SCALED else 1.0
    inverse = _inverse(out_scale) if EMIT else 1.0
    peak = tl.zeros([BLOCK_M], tl.float32)
    done = tl.program_id(0) - BLOCKS  # counts like `tile`, apart from it, so that a flattened loop may read ahead
    for tile in tl.range(tl.program_id(0), tiles, BLOCKS, flatten=FLATTEN):
        row, col = tile // tiles_n * BLOCK_M, tile % tiles_n * BLOCK_N
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, K, BLOCK_K):
            a = _read(A, row, k, T, K, TMA, BLOCK_M, BLOCK_K)
            if TURN:
                b = _read(B, k, col, K, N, TMA, BLOCK_K, BLOCK_N)
            else:
                b = _read(B, col, k, N, K, TMA, BLOCK_N, BLOCK_K).T
            total = tl.dot(a, b, total, input_precision="ieee")
        done += BLOCKS
        row, col = done // tiles_n * BLOCK_M, done % tiles_n * BLOCK_N
        total *= scale
        left = total
        if PARTS == 2:
            left, right = total.reshape(BLOCK_M, 2, PART).permute(0, 2, 1).split()
        post = None
        if BACKWARD:
            post = _read(POST, row, col, T, N, TMA, BLOCK_M, PART)
        peak = _finish(left, post, row, col, peak, inverse, OUT, OUT8, T, N, LIMIT, DTYPE, DTYPE8,
                       BACKWARD, EMIT, TMA, BLOCK_M, PART)  # fmt: skip
        if PARTS == 2:
            if BACKWARD:
                post = _read(POST, row, col + PART, T, N, TMA, BLOCK_M, PART)
            peak = _finish(right, post, row, col + PART, peak, inverse, OUT, OUT8, T, N, LIMIT, DTYPE, DTYPE8,
                           BACKWARD, EMIT, TMA, BLOCK_M, PART)  # fmt: skip
    if PEAK:
        _write_peak(peaks, peak, BLOCKS, PEAKS)


@triton.jit
def _relu2_pass_kernel(
    X, POST, OUT8, peaks, out_scale, size, LIMIT: tl.constexpr, DTYPE8: tl.constexpr, BACKWARD: tl.constexpr,
    EMIT: tl.constexpr, PEAK: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PEAKS: tl.constexpr,
):  # fmt: skip
    inverse = _inverse(out_scale) if EMIT else 1.0
    peak = tl.zeros([BLOCK], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(size, BLOCK), BLOCKS):
        at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)  # 400,000 x 3,072 is close to 2^31
        inside = at < size
        x = tl.load(X + at, mask=inside, other=0.0)
        if BACKWARD:
            root = tl.sqrt(tl.load(POST + at, mask=inside, other=0.0).to(tl.float32))
            result = (2.0 * root * x.to(tl.float32)).to(x.dtype)
        else:
            result = _relu2(x)
            peak = larger(peak, result.to(tl.float32))
        tl.store(X + at, result, mask=inside)
        if EMIT:
            tl.store(OUT8 + at, _codes(result, inverse, LIMIT, DTYPE8), mask=inside)
    if PEAK:
        _write_peak(peaks, peak, BLOCKS, PEAKS)


def relu2_product(
    A: Tensor, B: Tensor, out: Tensor, tile: Persistent, *, scales: tuple[Tensor, Tensor] | None = None,
    post: Tensor | None = None, out8: Tensor | None = None, out_scale: Tensor | None = None,
    peaks: Tensor | None = None, turned: bool = False, tma: bool | None = None,
) -> None:  # fmt: skip
    """out (T, N) <- relu(A B^T)^2, or with `post` (T, N) 2 sqrt(post) (A B^T).

    A (T, K) and B (N, K), or (K, N) with `turned`, one dtype, or both FP8; `scales`: what a code of 1 stands for in
    each, 0-D fp32. All contiguous. The forward product is rounded to out's dtype before the square, the backward one
    with its factor. out8 (T, N) <- out / out_scale in its dtype, clamped. peaks (RELU2_PEAKS,) fp32: some of its values
    is the largest of out, the others are smaller; forward only. NaN stays NaN everywhere. tma: None where it fits.
    """
    (T, K), N = A.shape, out.shape[1]
    assert all(t.is_contiguous() for t in (A, B, out, post, out8) if t is not None)
    assert B.shape == ((K, N) if turned else (N, K)), (A.shape, B.shape, out.shape)
    assert post is None or peaks is None
    assert (out8 is None) == (out_scale is None)
    if not out.numel():
        return
    if tma is None:
        tma = fits_tma(A, B, out, post, out8)
    part = (tile.m, tile.n // tile.parts)
    left, right = _tiles(A, (tile.m, tile.k), tma), _tiles(B, (tile.k, tile.n) if turned else (tile.n, tile.k), tma)
    tiles = triton.cdiv(T, tile.m) * triton.cdiv(N, tile.n)
    blocks = min(multiprocessors(out.device) * tile.blocks, tiles, RELU2_PEAKS)
    a_scale, b_scale = scales or (None, None)
    with torch.cuda.device_of(out):
        _relu2_product_kernel[(blocks,)](
            left, right, _tiles(post, part, tma), _tiles(out, part, tma), _tiles(out8, part, tma), peaks,
            a_scale, b_scale, out_scale, T, N, K, _limit(out8), FLOATS[out.dtype], _dtype8(out8),
            SCALED=scales is not None, BACKWARD=post is not None, EMIT=out8 is not None, PEAK=peaks is not None,
            TURN=turned, TMA=tma, BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, PARTS=tile.parts,
            FLATTEN=tile.flatten, BLOCKS=blocks, PEAKS=RELU2_PEAKS, num_stages=tile.stages,
            num_warps=tile.warps,
        )  # fmt: skip


def relu2_pass(
    x: Tensor, *, post: Tensor | None = None, out8: Tensor | None = None, out_scale: Tensor | None = None,
    peaks: Tensor | None = None,
) -> None:  # fmt: skip
    """x <- relu(x)^2, or with `post` 2 sqrt(post) x, in place; the other arguments as in `relu2_product`."""
    assert all(t.is_contiguous() for t in (x, post, out8) if t is not None)
    assert post is None or peaks is None
    assert (out8 is None) == (out_scale is None)
    size, (block, warps) = x.numel(), RELU2_PASS
    if not size:
        return
    blocks = min(triton.cdiv(size, block), RELU2_PEAKS)
    with torch.cuda.device_of(x):
        _relu2_pass_kernel[(blocks,)](
            x, post, out8, peaks, out_scale, size, _limit(out8), _dtype8(out8), BACKWARD=post is not None,
            EMIT=out8 is not None, PEAK=peaks is not None, BLOCK=block, BLOCKS=blocks, PEAKS=RELU2_PEAKS,
            num_warps=warps,
        )  # fmt: skip


def fits_tma(*matrices: Tensor | None) -> bool:
    """Whether the copy engine moves tiles of these: Hopper or later, rows and addresses at multiples of 16 bytes."""
    present = [t for t in matrices if t is not None]
    return _has_tma(present[0].device) and all(
        t.shape[-1] * t.element_size() % 16 == 0 and t.data_ptr() % 16 == 0 for t in present
    )


@functools.cache
def _has_tma(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _tiles(X: Tensor | None, shape: tuple[int, int], tma: bool) -> Any:
    """What the kernel reads tiles of that shape from. Without a tensor None: a descriptor nobody uses costs stages."""
    if X is None or not tma:
        return X
    return TensorDescriptor(X, list(X.shape), list(X.stride()), list(shape))


def _limit(out8: Tensor | None) -> float:
    return 0.0 if out8 is None else torch.finfo(out8.dtype).max


def _dtype8(out8: Tensor | None) -> Any:
    return None if out8 is None else FLOATS[out8.dtype]
