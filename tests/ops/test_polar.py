"""The truth here is a float64 SVD: U f(S) V^T, with f the scalar polynomials written out below."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanosprint.ops import polar

F64 = torch.float64
ODD_SHAPES = [(1, 7), (7, 1), (1, 1), (3, 1000), (65, 64), (2, 3, 5, 4), (4, 33, 17)]
TRIPLES = {
    "ns5": [(3.4445, -4.7750, 2.0315)] * 5,
    "polar_express": [
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ],
}


def by_svd(G, name):
    """float64: normalise, apply the scalar polynomial to each singular value, put the matrix together again."""
    U, S, Vh = torch.linalg.svd(G.double(), full_matrices=False)
    norm = S.square().sum(-1, keepdim=True).sqrt()
    s = S / (norm + 1e-7) if name == "ns5" else S / (1.02 * norm + 1e-6)
    for a, b, c in TRIPLES[name]:
        s = a * s + b * s**3 + c * s**5
    return (U * s.unsqueeze(-2)) @ Vh


def with_singular_values(values, rows, cols, seed=0):
    generator = torch.Generator().manual_seed(seed)
    r = len(values)
    U = torch.linalg.qr(torch.randn(rows, r, dtype=F64, generator=generator)).Q
    V = torch.linalg.qr(torch.randn(cols, r, dtype=F64, generator=generator)).Q
    return (U * values) @ V.mT, U @ V.mT


def relative(out, truth):
    return ((out.double() - truth).norm() / truth.norm()).item()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("name", TRIPLES)
@pytest.mark.parametrize("shape", [*ODD_SHAPES, (64, 64), (96, 32)])
def test_equals_the_polynomial_of_an_svd(name, shape):
    G = torch.randn(*shape, dtype=F64)
    before = G.clone()
    out = polar.orthogonalizer(name)(G, dtype=F64)
    assert out.shape == G.shape
    assert out.dtype == F64
    assert relative(out, by_svd(G, name)) < 1e-9
    assert torch.equal(G, before)


@pytest.mark.parametrize("name", TRIPLES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("shape", [(64, 64), (128, 96), (96, 256), (2, 128, 64)])
def test_working_precision(name, dtype, tolerance, shape):
    G = torch.randn(*shape)
    out = polar.orthogonalizer(name)(G, dtype=dtype)
    assert out.dtype == dtype
    assert relative(out, by_svd(G, name)) < tolerance


@pytest.mark.parametrize(
    ("name", "smallest", "low", "high"),
    [("ns5", 1.5e-3, 0.68, 1.21), ("ns5", 1e-2, 0.68, 1.135), ("polar_express", 1.03e-3, 0.859, 1.1411)],
)
@pytest.mark.parametrize(("rows", "cols"), [(96, 96), (160, 96), (96, 160)])
def test_singular_values_land_in_the_stated_band_and_vectors_stay(name, smallest, low, high, rows, cols):
    values = torch.logspace(0, -6, 40, dtype=F64)
    values = (values / values.norm()).clamp_min(smallest)
    values = values / values.norm()
    values = values[values >= 0.999 * smallest]
    G, polar_factor = with_singular_values(values, rows, cols)
    G = G * 37.0  # the input's size does not matter
    out = polar.orthogonalizer(name)(G, dtype=F64)
    s = torch.linalg.svdvals(out)[: len(values)]
    assert s.min() >= low - 1e-3
    assert s.max() <= high + 1e-3
    assert relative(out, polar_factor) < max(1 - low, high - 1) + 1e-3  # the polar factor itself, within the band
    cosine = (out * polar_factor).sum() / out.norm() / polar_factor.norm()
    assert cosine > 0.97


@pytest.mark.parametrize("name", TRIPLES)
def test_bf16_stays_in_a_band_on_wide_spectra(name):
    """Four decades: bf16 refills the small ones, but nothing explodes or vanishes."""
    G, _ = with_singular_values(torch.logspace(0, -4, 64, dtype=F64), 64, 128)
    out = polar.orthogonalizer(name)(G.float())
    assert relative(out, by_svd(G, name)) < 0.25
    assert torch.linalg.svdvals(out.double()).max() < 1.25


@pytest.mark.parametrize("name", TRIPLES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rank_one_and_zero(name, dtype):
    """Rank one puts the whole norm into one singular value, the edge beyond which Polar Express explodes."""
    rank_one = torch.outer(torch.randn(50), torch.randn(70))
    out = polar.orthogonalizer(name)(rank_one, dtype=dtype)
    s = torch.linalg.svdvals(out.double())
    assert 0.65 < s[0] < 1.2
    assert torch.equal(polar.orthogonalizer(name)(torch.zeros(5, 3), dtype=dtype), torch.zeros(5, 3, dtype=dtype))


def test_polar_express_explodes_just_above_one_and_is_kept_below():
    """Why the norm is divided by 1.02 more than needed: rank one has its whole norm in one singular value."""

    def composite(s):
        for a, b, c in TRIPLES["polar_express"]:
            s = a * s + b * s**3 + c * s**5
        return s

    assert abs(composite(1.0218)) < 1.2
    assert abs(composite(1.03)) > 1e3
    for dtype in (torch.bfloat16, torch.float32, F64):
        rank_one = torch.outer(torch.randn(300, dtype=F64), torch.randn(200, dtype=F64))
        X = polar._normalize(rank_one, dtype, margin=1.02, eps=1e-6)
        assert torch.linalg.svdvals(X[0].double()).max() < 0.99


@pytest.mark.parametrize("name", TRIPLES)
def test_batch_equals_one_by_one_and_strides_do_not_matter(name):
    f = polar.orthogonalizer(name)
    G = torch.randn(5, 24, 40)
    torch.testing.assert_close(f(G, dtype=F64), torch.stack([f(g, dtype=F64) for g in G]))
    torch.testing.assert_close(f(G.mT, dtype=F64), f(G.mT.contiguous(), dtype=F64))
    torch.testing.assert_close(f(G.mT, dtype=F64), f(G, dtype=F64).mT)  # tall is wide transposed
    assert f(torch.randn(0, 4, 3)).shape == (0, 4, 3)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 24), st.integers(1, 24), st.floats(-6, 6), st.sampled_from(sorted(TRIPLES)))
def test_any_shape_and_size(rows, cols, exponent, name):
    G = torch.randn(rows, cols, dtype=F64, generator=torch.Generator().manual_seed(rows * 31 + cols)) * 10**exponent
    torch.testing.assert_close(polar.orthogonalizer(name)(G, dtype=F64), by_svd(G, name), atol=1e-6, rtol=1e-6)


def test_steps_and_coefficients():
    """The cubic (2, -1.5, .5) of the step-count benchmark converges to the polar factor itself."""
    G, factor = with_singular_values(torch.logspace(0, -2, 20, dtype=F64), 30, 20)
    out = polar.newton_schulz(G, steps=12, dtype=F64, coefficients=(2.0, -1.5, 0.5))
    assert relative(out, factor) < 1e-4


def test_compiles_without_graph_break():
    for f in (polar.newton_schulz, polar.polar_express):
        G = torch.randn(3, 12, 20)
        compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(G, dtype=torch.float32), f(G, dtype=torch.float32))


def test_opcheck():
    X = torch.randn(2, 16, 24).bfloat16() / 30
    torch.library.opcheck(torch.ops.nanosprint.quintic_steps.default, (X, [*polar.NS5, *polar.NS5]))
    out = torch.ops.nanosprint.quintic_steps(X, [*polar.NS5] * 5)
    torch.testing.assert_close(out, polar.quintic_steps_reference(X.clone(), [polar.NS5] * 5), atol=0, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", TRIPLES)
@pytest.mark.parametrize(
    "shape",
    [
        (2, 256, 768),
        (60, 256, 768),
        (40, 768, 256),
        (3, 768, 768),
        (2, 3072, 768),
        (768, 3072),
        (2, 333, 514),
        (5, 33, 17),
    ],
)  # fmt: skip
def test_gpu_kernels(name, shape):
    """bf16 through the symmetric kernels is as far from float64 as with cuBLAS, and the same when compiled."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    G = torch.randn(*shape, device="cuda")
    before, f = G.clone(), polar.orthogonalizer(name)
    out, truth = f(G), by_svd(G, name)
    assert (out.dtype, out.shape) == (torch.bfloat16, G.shape)
    X = (G.bfloat16() / ((1.0 if name == "ns5" else 1.02) * G.norm(dim=(-2, -1), keepdim=True))).bfloat16()
    plain = polar.quintic_steps_reference(X.reshape(-1, *shape[-2:]).clone(), TRIPLES[name]).view(G.shape)
    assert relative(out, truth) < max(1.15 * relative(plain, truth), 1.3e-2)
    assert torch.equal(G, before)
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)(G)
    assert relative(compiled, out.double()) < 1.5e-2
    assert not f(torch.zeros_like(G)).any()


def test_flops():
    assert polar.orthogonalize_flops(1, 768, 768) == 5 * 6 * 768**3
    assert polar.orthogonalize_flops(2, 768, 3072) == 2 * 5 * 18 * 768**3
    assert polar.orthogonalize_flops(2, 3072, 768) == 2 * 5 * 18 * 768**3


def test_user_mistakes():
    with pytest.raises(ValueError, match=r"shape \(4,\)"):
        polar.newton_schulz(torch.randn(4))
    with pytest.raises(ValueError, match="int64"):
        polar.polar_express(torch.ones(2, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="steps=0"):
        polar.newton_schulz(torch.randn(2, 2), steps=0)
    with pytest.raises(ValueError, match=r"'svd' is unknown.*ns5, polar_express"):
        polar.orthogonalizer("svd")
