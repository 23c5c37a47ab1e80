"""What runs on which card: FP8, attention back ends and kernels, told by a pretended capability. No GPU is touched."""

import logging
from types import SimpleNamespace

import pytest
import torch

from nanosprint.config import Execution
from nanosprint.kernels import tuning
from nanosprint.ops import attention, compose, fp8, linear_relu2, softcap_xent, symmetric
from nanosprint.ops.attention_backends import fa2, fa3, fa4, windowed
from nanosprint.recipes import load_recipe
from nanosprint.training import resolve, setup

CUDA = torch.device("cuda")
TURING, AMPERE, CONSUMER_AMPERE, ADA, HOPPER, BLACKWELL = (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0)
EVERYWHERE = {"sdpa", "flex", "reference"}  # "batched" has no documents


@pytest.fixture
def card(monkeypatch):
    """Pretends an NVIDIA GPU of that capability with every library there is; with `hip`, one of AMD's."""

    def pretend(capability, hip=None):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.version, "hip", hip)
        for module in (fa2, fa3, fa4, windowed):
            monkeypatch.setattr(module, "missing", lambda: None)
        for module in (compose, linear_relu2, softcap_xent, symmetric):
            monkeypatch.setattr(module, "has_triton", lambda: True)

    return pretend


@pytest.mark.parametrize(
    ("capability", "hip", "has"),
    [
        (TURING, None, False),
        (AMPERE, None, False),
        (CONSUMER_AMPERE, None, False),
        (ADA, None, True),
        (HOPPER, None, True),
        (BLACKWELL, None, True),
        ((12, 0), None, True),
        ((9, 4), "6.4", False),
    ],
)
def test_fp8(capability, hip, has, card, caplog):
    card(capability, hip)
    assert fp8.supports_fp8(CUDA) == has
    recipe = load_recipe("record")
    fp8._warn_without_fp8.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            head = setup._head_loss(recipe, Execution(compute="bf16"), CUDA)
    assert ("scales" in getattr(head, "keywords", {})) == has
    assert caplog.text.count("no FP8") == (not has)


@pytest.mark.parametrize(
    ("capability", "hip", "more"),
    [
        (TURING, None, set()),
        (AMPERE, None, {"fa2", "triton"}),
        (ADA, None, {"fa2", "triton"}),
        (HOPPER, None, {"fa2", "fa3", "fa4", "triton"}),
        (BLACKWELL, None, {"fa2", "fa4", "triton"}),
        ((9, 4), "6.4", {"triton"}),
    ],
)
def test_attention_of_packed_documents(capability, hip, more, card):
    card(capability, hip)
    needs = attention.Needs(device=CUDA, dtype=torch.bfloat16, head_dim=128, documents=True, window=True)
    refused = {name: entry.refuses(needs) for name, entry in attention.BACKENDS.items()}
    assert {name for name, reason in refused.items() if reason is None} == EVERYWHERE | more
    if hip:
        assert refused["fa2"] == "runs on NVIDIA GPUs only, not on AMD's"
        call = attention.Call(rows=1, seq_len=64, num_heads=6, head_dim=128)
        assert attention.choose(CUDA, torch.bfloat16, (call,)) == "sdpa"


@pytest.mark.parametrize("capability", [AMPERE, CONSUMER_AMPERE, ADA, HOPPER, BLACKWELL, (12, 0)])
def test_kernels_off_the_card_they_were_tuned_on(capability, card):
    """All serve; what was only seen to win on the measured card is left to libraries elsewhere, and tiles are small."""
    card(capability)
    bf16 = SimpleNamespace(dtype=torch.bfloat16, is_cuda=True, device=CUDA)
    assert softcap_xent.uses_kernel(CUDA)
    assert symmetric.fits_kernel(bf16)
    assert compose._kernels_serve(torch.bfloat16, 128, 112)
    measured = capability == HOPPER
    assert tuning.wins(768, capability) == measured
    routes = {linear_relu2._route(kind, CUDA, torch.bfloat16) for kind in ("up", "up8")}
    assert routes == ({"fused"} if measured else {"pass"})
    tiles = [tuning.symmetric_tile(768, capability), tuning.full_tile(capability), tuning.relu2_tile("up", capability)]
    for tile in tiles:  # operands in flight and the result, in 16 bits: 227 KiB on Hopper, 99 on the smallest card
        shared = 2 * (tile.stages * tile.k * (tile.m + tile.n) + tile.m * tile.n // getattr(tile, "parts", 1))
        assert shared <= (227 if measured else 99) * 1024, (capability, tile)


def test_amd_gets_formulas_where_a_kernel_is_nvidias(card, caplog):
    card((9, 4), "6.4")
    bf16 = SimpleNamespace(dtype=torch.bfloat16, is_cuda=True, device=CUDA)
    assert not softcap_xent.uses_kernel(CUDA)
    assert not symmetric.fits_kernel(bf16)
    assert linear_relu2._route("up", CUDA, torch.bfloat16) == "formula"
    compose._said.clear()
    with caplog.at_level(logging.WARNING):
        assert not compose._kernels_serve(torch.bfloat16, 128, 112)
    assert "composed attention runs as plain formulas" in caplog.text
    assert setup._head_loss(load_recipe("record"), Execution(compute="bf16"), CUDA) is None


def test_a_gpu_without_bf16_computes_in_fp32(monkeypatch):
    for has, compute in ((False, "fp32"), (True, "bf16")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, has=has: has)
        assert resolve._compute(Execution(), load_recipe("sub3"), CUDA) == compute
