"""Copies of many weights at once: byte for byte against the formula, in two launches."""

import pytest
import torch

from nanosprint.ops import fp8
from nanosprint.ops.fp8_copies import Copy, renew, renew_reference
from tests.ops.counted import Counted

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [((96, 48), (48, 48)), ((48, 48),), ((32, 80),), ((160, 144),), ((16, 16), (16, 16), (32, 16))]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def exact(shape, exponent):
    """Values that E4M3 holds exactly once divided by a power of two: how a cast rounds does not count."""
    codes = torch.randint(48, 120, shape) + 128 * torch.randint(2, shape)  # 2^-1 .. 240
    codes[0, 0] = 126  # 448
    return codes.to(torch.uint8).view(fp8.E4M3).float() * 2.0**exponent


def copies_of(device, dtype, shapes=SHAPES, weights=exact):
    """Stale copies of every kind: with a factor or none, lagging and fresh or not, turned or not."""

    def stale(*shape):
        return torch.full(shape, 77, dtype=torch.uint8, device=device)

    def number(value):
        return torch.full((), value, device=device)

    copies = []
    for i, group in enumerate(shapes):
        parts = tuple((weights(shape, -8 - i - j) * (i != 3)).to(device, dtype) for j, shape in enumerate(group))
        rows, cols = sum(len(part) for part in parts), parts[0].shape[1]
        for factor in (None, number(-0.3), number(3.0).bfloat16()):
            for turned in (True, False):
                copies.append(
                    Copy(parts, stale(rows, cols), stale(cols, rows) if turned else None, number(1.0), factor)
                )
        for fresh in (True, False):
            lag = {"next_scale": number(2.0 ** (-7 - i)), "headroom": 2.0 ** (1 + i % 2), "fresh": fresh}
            copies.append(Copy(parts, stale(rows, cols), stale(cols, rows), number(1.0), **lag))
    return copies


def cloned(copy):
    return copy._replace(
        **{k: v.clone() for k, v in copy._asdict().items() if isinstance(v, torch.Tensor) and k != "factor"}
    )


def check_renew(device, dtype, run, shapes=SHAPES):
    """`run` against the formula, twice, so that what was next comes into its place."""
    ours = copies_of(device, dtype, shapes)
    twins = [cloned(copy) for copy in ours]
    for _ in range(2):
        run(ours)
        for copy in twins:
            renew_reference(copy)
        for a, b in zip(ours, twins, strict=True):
            for name, got, expected in zip(Copy._fields, a, b, strict=True):
                if isinstance(got, torch.Tensor):
                    assert torch.equal(got, expected), (name, a)
            assert a.turned is None or torch.equal(a.turned, a.codes.mT)


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_formula(device, dtype):
    """Against definitions: the scale of the largest value of all parts, factor and lag aside."""
    for copy in copies_of(device, dtype):
        weight = torch.cat(copy.parts)
        present, following = fp8.scale_of(weight), None if copy.next_scale is None else copy.next_scale.clone()
        renew([copy])
        used = following if copy.takes_next else present
        assert torch.equal(copy.codes, fp8.quantize(weight, used, fp8.E4M3).view(torch.uint8))
        assert copy.scale.item() == pytest.approx(used.item() * (1 if copy.factor is None else copy.factor.item()))
        assert copy.next_scale is None or copy.next_scale == present * copy.headroom
        assert copy.turned is None or torch.equal(copy.turned, copy.codes.mT)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", DEVICES[1:], indirect=True)
def test_kernels(device, dtype):
    check_renew(device, dtype, renew)
    check_renew(device, dtype, renew, [((1536, 768), (768, 768)), ((768, 768),), ((3072, 768),)])


@pytest.mark.gpu
@pytest.mark.parametrize("device", DEVICES[1:], indirect=True)
def test_kernels_on_any_values_and_mixed_dtypes(device):
    """A weight of two dtypes; a NaN, which spoils its own weight's scale alone; a graph, recorded and replayed."""
    wide, narrow = torch.randn(96, 48, device=device), torch.randn(48, 48, device=device).bfloat16()
    copies = [cloned(c) for c in copies_of(device, torch.bfloat16, weights=lambda shape, _: torch.randn(shape))]
    codes = torch.zeros(144, 48, dtype=torch.uint8, device=device)
    copies.append(Copy((wide, narrow), codes, codes.mT.contiguous(), torch.ones((), device=device)))
    twins = [cloned(copy) for copy in copies]
    copies[1].parts[0][3, 4] = float("nan")
    renew(copies)
    for copy, twin in zip(copies, twins, strict=True):
        renew_reference(twin)
        torch.testing.assert_close(copy.scale, twin.scale, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(copy.codes, twin.codes)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        renew(copies)
    wide.mul_(3)
    graph.replay()
    renew_reference(twins[-1])
    assert torch.equal(copies[-1].scale, twins[-1].scale)


def test_a_copy_cannot_lag_behind_a_factor():
    (copy,) = [c for c in copies_of("cpu", torch.float32, [((16, 16),)]) if c.takes_next]
    with pytest.raises(ValueError, match="cannot lag"):
        renew([copy._replace(factor=torch.ones(()))])


def test_kernel_logic_in_the_interpreter(run_interpreted):
    run_interpreted(__file__)


def interpreted():
    from nanosprint.kernels import fp8_copies as kernels

    # Small: the interpreter reduces element by element.
    kernels.PEAKS, kernels.QUANTIZE, kernels.TURN_CODES = (2, 64, 1), (32, 64, 1), (16, 32, 1)
    shapes = [((32, 16), (16, 16)), ((16, 80),), ((48, 16),), ((16, 16),)]  # the last one zero
    for name in ("_peak_kernel", "_renew_kernel", "_turn_kernel"):
        setattr(kernels, name, Counted(getattr(kernels, name)))
    for dtype, launches in ((torch.bfloat16, 2), (torch.float32, 3)):
        Counted.launches = 0
        check_renew("cpu", dtype, lambda copies: kernels.renew(copies, fp8.LEAST), shapes)
        assert Counted.launches == 2 * launches, (dtype, Counted.launches)  # of two calls


if __name__ == "__main__":
    interpreted()
