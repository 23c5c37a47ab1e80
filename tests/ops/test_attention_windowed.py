"""Back end "triton": its kernels' logic in Triton's interpreter, on a GPU its tiles, strides and large tensors.

`test_attention.py` has it among all back ends.
"""

import sys

import pytest
import torch

from nanosprint.kernels import has_gluon, has_triton, tuning
from nanosprint.ops.attention import available, backend, check_documents, pack_documents, require
from nanosprint.ops.attention_backends import probe, windowed
from nanosprint.ops.attention_backends.measure import sample_documents
from nanosprint.ops.attention_backends.table import TABLE, Needs

CASES = {  # name: (rows, tokens of a row, lengths of documents or None, windows)
    "lengths of all kinds": (1, 137, [1, 1, 70, 0, 33, 1, 31, 0, 0], (None, 0, 40, 500)),
    "many single tokens": (1, 40, [1] * 40, (None, 3)),
    "one document of full blocks": (1, 128, [128], (None, 46, 63)),
    "two rows": (2, 71, [71, 20, 0, 51], (0, 30)),
    "rows without documents": (2, 75, None, (None, 17)),
    "less than a block": (1, 3, [2, 1], (None, 1)),
}
TILES = (  # forward, gradient_q, gradient_kv: wide or high, with and without branches and descriptors
    (tuning.AttentionTile(16, 32, 4, 2), tuning.AttentionTile(32, 16, 4, 2), tuning.AttentionTile(16, 32, 4, 2)),
    (
        tuning.AttentionTile(32, 16, 4, 2, branch=False),
        tuning.AttentionTile(16, 16, 4, 2, descriptors=True),
        tuning.AttentionTile(32, 32, 4, 2, branch=False, descriptors=True),
    ),
    (
        tuning.AttentionTile(32, 32, 4, 2, descriptors=True),
        tuning.AttentionTile(16, 32, 4, 2, branch=False),
        tuning.AttentionTile(16, 16, 4, 2),
    ),
)
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() and has_triton()), reason="needs a CUDA device and Triton"),
]
EVERY_TILE = [
    pytest.param(which, tile, id=f"{name} {tile}", marks=on_gpu)
    for which, (name, tiles) in enumerate(
        {
            "forward": tuning.ATTENTION_FORWARD,
            "gradient_q": tuning.ATTENTION_GRADIENT_Q,
            "gradient_kv": tuning.ATTENTION_GRADIENT_KV,
        }.items()
    )
    for tile in tiles
]


def test_kernel_logic_in_the_interpreter(run_interpreted):
    run_interpreted(__file__)


def interpreted():
    """Output and gradients in fp32. What a kernel leaves out is NaN, since so is all memory that nobody filled."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(4).isnan().all()
    attend = windowed.load()
    for i, (rows, seq_len, lengths, windows) in enumerate(CASES.values()):
        packed = lengths and check_documents(pack_documents(lengths, slots=len(lengths) + 3), rows, seq_len)
        leaves = probe.random_inputs((rows, seq_len, 2, 16), torch.float32, torch.device("cpu"))
        for j, window in enumerate(windows):
            windowed._tiles = lambda device, n=i + j: TILES[n % len(TILES)]
            worst = max(probe.errors(attend, leaves, 0.4, window, packed))
            assert worst < 1e-5, (lengths, window, worst)
    q, k, v = (t.unsqueeze(0) for t in torch.randn(3, 40, 2, 16))
    with pytest.raises(ValueError, match=r"scale above 0, got 0.0"):
        attend(q, k, v, 0.0, None)
    with pytest.raises(ValueError, match=r"takes heads of 16, 32, 64, 128, not 12"):
        attend(q[..., :12], k[..., :12], v[..., :12], 0.1, None)
    windowed._tiles = lambda device: TILES[1]
    mixed = torch.randn(1, 40, 2, 3 * 16 + 1)  # heads apart, tokens at odd addresses: copied first
    slices = [mixed[..., 1 + n * 16 : 17 + n * 16].requires_grad_() for n in range(3)]
    assert max(probe.errors(attend, [*slices, torch.randn(1, 40, 2, 16)], 0.4, 9, None)) < 1e-5
    beyond = torch.full((3, 1, 100, 2, 16), float("nan"))  # which whoever reads past the last token meets
    beyond[:, :, :40] = torch.randn(3, 1, 40, 2, 16)
    leaves = [*(t[:, :40].requires_grad_() for t in beyond.unbind()), torch.randn(1, 40, 2, 16)]
    for tiles in TILES:
        windowed._tiles = lambda device, tiles=tiles: tiles
        assert max(probe.errors(attend, leaves, 0.4, 9, None)) < 1e-5


def test_what_it_refuses():
    cpu, half = torch.device("cpu"), torch.bfloat16
    assert "GPU" in available(cpu)["triton"]
    with pytest.raises(ValueError, match=r"exec.attention=triton cannot serve here: it runs on GPUs only, not on cpu"):
        require("triton", Needs(device=cpu, dtype=half, head_dim=64))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.float32}, "takes bf16 and fp16, not torch.float32"),
        ({"head_dim": 96}, r"takes heads of 16, 32, 64, 128, not 96"),
        ({"head_dim": 8}, r"takes heads of 16, 32, 64, 128, not 8"),
        ({}, None),
    ],
)
def test_what_it_takes_on_a_gpu(monkeypatch, change, message):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(windowed, "missing", lambda: None)
    needs = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "head_dim": 128, **change}
    reason = TABLE["triton"].refuses(Needs(**needs))
    assert reason is None if message is None else message in reason


def test_an_old_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(windowed, "missing", lambda: None)
    needs = Needs(device=torch.device("cuda"), dtype=torch.float16, head_dim=64)
    assert TABLE["triton"].refuses(needs) == "needs compute capability 8.0, this GPU has (7, 5)"


def test_every_tile_fits_its_card():
    """Shared memory with heads of 128 in 16 bits: 227 KiB on Hopper, 99 on the smallest card that has bf16."""
    kinds = ("ATTENTION_FORWARD", "ATTENTION_GRADIENT_Q", "ATTENTION_GRADIENT_KV")
    for which, kind in enumerate(kinds):
        for tile, limit in [(t, 227) for t in getattr(tuning, kind)] + [
            (tuning.attention_tiles((8, 6), has_gluon)[which], 99)
        ]:
            kept, passing = (tile.keys, tile.queries) if which == 2 else (tile.queries, tile.keys)
            blocks_kept = (1, 2, 2)[which]
            assert (blocks_kept * kept + 2 * tile.stages * passing) * 256 <= limit * 1024, (kind, tile)


@pytest.mark.parametrize(("which", "tile"), EVERY_TILE)
def test_gpu_tiles(which, tile, monkeypatch):
    from nanosprint.kernels import attention

    device = torch.device("cuda")
    tiles = list(tuning.attention_tiles(torch.cuda.get_device_capability(), has_gluon))
    tiles[which] = tile
    monkeypatch.setattr(windowed, "_tiles", lambda device: tuple(tiles))
    compiled, launch = [], attention.launch
    monkeypatch.setattr(attention, "launch", lambda *args: compiled.append(launch(*args)))
    packed = pack_documents([1, 130, 0, 1, 7, 194, 1, 0, 0, 700], slots=16, device=device)
    leaves = probe.random_inputs((1, 1034, 3, 128), torch.bfloat16, device)
    for window in (None, 0, 140):
        forward, *gradients = probe.errors(backend("triton"), leaves, 0.12, window, packed)
        assert forward <= 5e-3
        assert max(gradients) <= 1e-2
    assert "cp.async" in compiled[which].asm["ptx"], "the loop does not load ahead"


@pytest.mark.parametrize("head_dim", [pytest.param(k, marks=on_gpu) for k in windowed.HEAD_DIMS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gpu_head_sizes_on_default_tiles(head_dim, dtype, monkeypatch):
    """The tiles of cards that nobody measured; odd lengths, merged projections, one head."""
    device = torch.device("cuda")
    monkeypatch.setattr(windowed, "_tiles", lambda device: tuning.attention_tiles((8, 0), has_gluon))
    for heads, lengths in ((3, [1, 130, 0, 202]), (1, [77])):
        total = sum(lengths)
        *_, weight = probe.random_inputs((1, total, heads, head_dim), dtype, device)
        qkv = torch.randn(1, total, 3, heads, head_dim, device=device, dtype=dtype)
        slices = [t.requires_grad_() for t in qkv.unbind(2)]
        errors = probe.errors(backend("triton"), [*slices, weight], 0.12, 60, pack_documents(lengths, device=device))
        assert max(errors) <= 1e-2


@pytest.mark.parametrize("shape", [pytest.param(s, marks=on_gpu) for s in [(49_152, 6, 128), (800_001, 3, 128)]])
def test_gpu_long_batches(shape):
    """Twice the same bits; and the last documents alone give what they gave at the end of all others."""
    device = torch.device("cuda")
    T, H, K = shape
    packed = sample_documents(1, T, 2048, device)
    leaves = [torch.randn(1, T, H, K, device=device, dtype=torch.bfloat16).requires_grad_(i < 3) for i in range(4)]

    def run(*qkvg, documents):
        out = backend("triton")(*qkvg[:3], 0.12, 640, documents)
        return out, *torch.autograd.grad(out, qkvg[:3], qkvg[3])

    whole = run(*leaves, documents=packed)
    for a, b in zip(whole, run(*leaves, documents=packed), strict=True):
        assert torch.equal(a, b)
    ends = packed.cu_seqlens
    start = int(ends[ends < T - 3000][-1])
    tail = [t[:, start:].detach().requires_grad_(i < 3) for i, t in enumerate(leaves)]
    documents = packed._replace(cu_seqlens=(ends - start).clamp_min(0)[(ends >= start).nonzero()[0, 0] :].contiguous())
    for a, b in zip(whole, run(*tail, documents=documents), strict=True):
        assert probe.relative_error(a[:, start:], b) < 5e-3  # tiles begin elsewhere, so P is rounded otherwise


if __name__ == "__main__":
    interpreted()


def test_another_triton_has_the_tiles_without_gluon_and_says_so_once(monkeypatch, caplog):
    class Triton:
        __version__ = "9.9.9"

    monkeypatch.setitem(sys.modules, "triton", Triton)
    has_gluon.cache_clear()
    for _ in range(2):
        assert not any(tile.overlap for tile in tuning.attention_tiles((9, 0), has_gluon))
    assert [record.message.split(":")[0] for record in caplog.records] == ["Triton 9.9.9"]
    has_gluon.cache_clear()
    assert all(tile.overlap for tile in tuning.attention_tiles((9, 0), lambda: True))
    assert not any(tile.overlap for tile in tuning.attention_tiles((8, 0), has_gluon))
