"""Symmetric products against float64; the Triton kernel's logic runs here too, in Triton's interpreter (fp32)."""

import pytest
import torch

from nanosprint.ops import symmetric

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ODD = [(2, 33, 50), (1, 70, 16), (3, 1, 7), (1, 7, 1), (2, 129, 65), (1, 16, 257)]
FULL = [(2, 256, 768), (3, 768, 768), (2, 3072, 768), (1, 768, 3072)]
TOLERANCE = {torch.bfloat16: 2.5e-3, torch.float32: 1e-5, torch.float64: 1e-14}


@pytest.fixture
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return request.param


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def relative(out, truth):
    return ((out.double() - truth).norm() / truth.norm()).item()


def sizes(device):
    return ODD + (FULL if device == "cuda" else [])


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gram_matrices(device, dtype):
    for shape in sizes(device):
        X = torch.randn(shape, device=device, dtype=torch.float64).to(dtype)
        wide = X.double()
        for out, truth in ((symmetric.xxt(X), wide @ wide.mT), (symmetric.xtx(X), wide.mT @ wide)):
            assert out.dtype == dtype
            assert out.shape == truth.shape
            assert out.is_contiguous()
            assert torch.equal(out, out.mT)
            assert relative(out, truth) < TOLERANCE[dtype]


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gram_poly(device, dtype):
    for shape in sizes(device):
        A = symmetric.xxt((torch.randn(shape, device=device) / shape[2] ** 0.5).to(dtype))
        out, wide = symmetric.gram_poly(A, -4.775, 2.0315), A.double()
        assert torch.equal(out, out.mT)
        assert out.is_contiguous()
        assert relative(out, -4.775 * wide + 2.0315 * wide @ wide) < TOLERANCE[dtype]


def test_of_a_matrix_that_is_not_symmetric_it_is_no_square():
    """The square is computed as A A^T: the documented answer, which is another than the polynomial's."""
    A = torch.randn(2, 24, 24).bfloat16()
    out, wide = symmetric.gram_poly(A, 0.5, -2.0), A.double()
    lower = (0.5 * wide - 2.0 * wide @ wide.mT).tril()
    assert relative(out, lower + lower.tril(-1).mT) < TOLERANCE[torch.bfloat16]
    assert relative(out, 0.5 * wide - 2.0 * wide @ wide) > 0.5


@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_strides_zeros_empty_and_a_hot_row(device):
    X = torch.randn(4, 48, 80, device=device).bfloat16()
    assert torch.equal(symmetric.xxt(X.mT), symmetric.xtx(X))
    assert torch.equal(symmetric.xxt(X[:, 8:40, 3:50]), symmetric.xxt(X[:, 8:40, 3:50].contiguous()))
    assert torch.equal(symmetric.xxt(X[1::2]), symmetric.xxt(X)[1::2])
    assert not symmetric.xxt(torch.zeros_like(X)).any()
    assert symmetric.xxt(X[:0]).shape == (0, 48, 48)
    X[:, 5] *= 1e4
    assert relative(symmetric.xxt(X), X.double() @ X.double().mT) < 2.5e-3
    X[1, 2, 3] = float("nan")
    assert symmetric.xxt(X)[1, 2].isnan().all()
    assert symmetric.xxt(X)[0].isfinite().all()


@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_opcheck(device):
    X = torch.randn(2, 17, 24, device=device).bfloat16()
    ops = torch.ops.nanosprint
    torch.library.opcheck(ops.xxt.default, (X,))
    torch.library.opcheck(ops.xtx.default, (X,))
    torch.library.opcheck(ops.gram_poly.default, (symmetric.xxt(X), 0.5, -2.0))


@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_compiles_without_graph_break(device):
    def f(X):
        return symmetric.gram_poly(symmetric.xxt(X), 0.5, -2.0), symmetric.xtx(X)

    X = torch.randn(2, 17, 24, device=device).bfloat16()
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    for out, expected in zip(compiled(X), f(X), strict=True):
        assert torch.equal(out, expected)


@pytest.mark.gpu
def test_two_runs_agree_bitwise():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    X = torch.randn(48, 768, 768, device="cuda").bfloat16()
    assert torch.equal(symmetric.xxt(X), symmetric.xxt(X))


def test_what_is_aligned_is_not_copied():
    X = torch.randn(2, 16, 24).bfloat16()
    assert symmetric.aligned(X).data_ptr() == X.data_ptr()
    padded = symmetric.aligned(X[:, :9, :13])
    assert padded.shape == (2, 16, 16)
    assert torch.equal(padded[:, :9, :13], X[:, :9, :13])
    assert not padded[:, 9:].any()
    assert not padded[:, :, 13:].any()
    odd = torch.randn(2 * 16 * 24 + 1).bfloat16()[1:].view(2, 16, 24)
    assert symmetric.aligned(odd).data_ptr() % 16 == 0
    assert torch.equal(symmetric.aligned(odd), odd)


def test_user_mistakes():
    with pytest.raises(ValueError, match=r"shape \(3, 4\).*\(batch, M, N\)"):
        symmetric.xxt(torch.zeros(3, 4))
    with pytest.raises(ValueError, match="int64"):
        symmetric.xtx(torch.zeros(1, 3, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="square and symmetric"):
        symmetric.gram_poly(torch.zeros(1, 3, 4), 1.0, 1.0)


def test_kernel_logic_in_the_interpreter(run_interpreted):
    run_interpreted(__file__)


def interpreted():
    """Products in fp32 on sizes around the tiles' edges; outputs start as NaN, so that a gap shows."""
    from nanosprint.kernels import tuning
    from nanosprint.kernels.polar import divide, quintic_steps
    from nanosprint.kernels.symmetric import Operand, product
    from nanosprint.kernels.tuning import Tile
    from nanosprint.ops.polar import NS5, quintic_steps_reference

    def fresh(*shape):
        return Operand(torch.full(shape, float("nan")))

    square, oblong = Tile(16, 16, 16, 1, 1), Tile(16, 32, 16, 1, 1)
    once = square._replace(once=True)
    for b, m, n in [(2, 36, 52), (1, 72, 16), (3, 16, 4), (1, 4, 8), (2, 48, 48)]:
        X, B = torch.randn(b, m, n), torch.randn(b, m, m)
        x = Operand(X)
        for side, P, turned in ((m, X, False), (n, X.mT, True)):
            out = fresh(b, side, side)
            product(x, x, out, square, turn_p=turned, turn_q=not turned, symmetric=True)
            torch.testing.assert_close(out.X, P @ P.mT, atol=1e-4, rtol=1e-5)
            assert torch.equal(out.X, out.X.mT)
            again = fresh(b, side, side)
            product(x, x, again, once, turn_p=turned, turn_q=not turned, symmetric=True)
            torch.testing.assert_close(again.X, out.X, atol=1e-4, rtol=1e-5)
            assert torch.equal(again.X, again.X.mT)
        A, poly = out, fresh(b, n, n)
        product(A, A, poly, square, turn_q=True, alpha=2.0, add=A, beta=-1.5, symmetric=True)
        torch.testing.assert_close(poly.X, 2.0 * A.X @ A.X - 1.5 * A.X, atol=1e-2, rtol=1e-4)
        assert torch.equal(poly.X, poly.X.mT)
        for P, Q, turned in ((B, X, False), (X, B, True)):
            truth = (P.mT if turned else P) @ Q
            out, added = fresh(*truth.shape), torch.randn(truth.shape)
            options = {"turn_p": turned, "alpha": 0.5, "add": Operand(added), "beta": 3.0}
            product(Operand(P), Operand(Q), out, oblong, **options)
            torch.testing.assert_close(out.X, 0.5 * truth + 3.0 * added, atol=1e-4, rtol=1e-5)

    X = torch.randn(3, 40, 72)
    norm = X.norm(dim=(1, 2), keepdim=True)
    torch.testing.assert_close(divide(X, norm), X / norm, atol=0, rtol=1e-6)
    for side, blocks in ((40, 1), (72, 3)):
        tall = torch.randn(2, side * blocks, side)
        norm_of_tall, out = tall.norm(dim=(1, 2), keepdim=True), torch.full_like(tall, float("nan"))
        assert divide(tall, norm_of_tall, 1.02, 1e-6, out=out, turned=True) is out
        truth = (tall / (norm_of_tall * 1.02 + 1e-6)).view(2, blocks, side, side).mT.reshape(tall.shape)
        torch.testing.assert_close(out, truth, atol=0, rtol=1e-6)
    for Y in (X / norm, (X / norm).mT.contiguous()):
        for steps in (1, 2, 5):
            truth = quintic_steps_reference(Y.clone(), (NS5,) * steps)
            torch.testing.assert_close(quintic_steps(Y, (NS5,) * steps, (8, 0)), truth, atol=1e-5, rtol=1e-4)
            tuning.CUBLAS_GRAMS = {(8, 0): ((range(40, 41), range(3, 4)),)}
            assert tuning.cublas_gram(40, 3, (8, 0))
            torch.testing.assert_close(quintic_steps(Y, (NS5,) * steps, (8, 0)), truth, atol=1e-5, rtol=1e-4)
            tuning.CUBLAS_GRAMS = {}


if __name__ == "__main__":
    interpreted()
