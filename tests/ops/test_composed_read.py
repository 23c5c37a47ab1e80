"""The composed maps' reading and its gradients against loops over rows, tokens and heads in float64."""

import logging

import pytest
import torch

from nanosprint.kernels import has_triton, tuning
from nanosprint.ops import compose
from nanosprint.ops.attention import pack_documents
from nanosprint.ops.attention_backends.contract import first_key
from nanosprint.ops.attention_backends.measure import sample_documents
from nanosprint.ops.compose import composed_read

NAMES = ("q", "k", "v", "w1", "w2")
# rows, tokens, heads, window, lengths of documents end to end (None: each row is one)
CASES = [
    (1, 1, 1, 4, None),
    (2, 37, 3, 16, None),
    (1, 41, 2, 1, [17, 0, 1, 1, 22]),
    (1, 53, 2, 20, [17, 0, 1, 30, 5]),
    (3, 19, 3, 6, [19, 4, 15, 1, 1, 17]),
    (2, 33, 1, 100, [1, 1, 31, 33]),
]


def inputs(B, S, H, K, *, dtype=torch.float64, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(B, S, H, K)] * 3 + [(B, S, H)] * 2
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).to(device) for s in shapes]


def by_loops(q, k, v, w1, w2, scale, window, lengths=None):
    """From the formula, for each token the keys that it sees."""
    B, S, H, _ = q.shape
    starts, at = [], 0
    for length in [S] * B if lengths is None else lengths:
        starts += [at] * length
        at += length
    out = []
    for b in range(B):
        for t in range(S):
            low = max(starts[b * S + t] - b * S, t - window + 1)
            mixed = 0
            for h in range(H):
                scores = scale * (k[b, low : t + 1, h] * q[b, t, h]).sum(-1)
                mixed = mixed + w1[b, t, h] * torch.exp(scores) / torch.exp(scores).sum()
            out += [w2[b, t, h] * (mixed[:, None] * v[b, low : t + 1, h]).sum(0) for h in range(H)]
    return torch.stack(out).view(q.shape)


def documents_of(lengths, device="cpu"):
    return None if lengths is None else pack_documents(lengths, slots=len(lengths) + 3, device=device)


def gradients(out, tensors, seed=1):
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.autograd.grad(out, tensors, weight.to(out.dtype).to(out.device))


def operator(q, k, v, w1, w2, scale, window, documents):
    """The kernels, wherever the tensors are."""
    first = first_key(*q.shape[:2], window - 1, documents, q.device)
    return compose._composed_read(q, k, v, w1, w2, first, scale, window)[0]


def check_operator(tensors, window, documents):
    """Registration, and the same numbers from one compiled graph."""
    first = first_key(*tensors[0].shape[:2], window - 1, documents, tensors[0].device)
    # Not the comparison of all outputs: columns of A that no visible key falls on are never written.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    operator_itself = torch.ops.nanosprint.composed_read.default
    torch.library.opcheck(operator_itself, (*tensors, first, 0.2, window), test_utils=checks)
    compiled = torch.compile(operator, fullgraph=True, dynamic=False, backend="aot_eager")
    results = [f(*tensors, 0.2, window, documents) for f in (operator, operator, compiled)]
    gradient_sets = [gradients(out, tensors) for out in results]
    for plain, again, fused in zip(*((r, *g) for r, g in zip(results, gradient_sets, strict=True)), strict=True):
        assert torch.equal(plain, again)
        assert torch.equal(plain, fused)


@pytest.mark.parametrize(("B", "S", "H", "window", "lengths"), CASES)
def test_the_formula_in_float64(B, S, H, window, lengths):
    tensors = [t.requires_grad_() for t in inputs(B, S, H, 4)]
    got = composed_read(*tensors, 0.7, window, documents_of(lengths))
    want = by_loops(*tensors, 0.7, window, lengths)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    for name, a, b in zip(NAMES, gradients(got, tensors), gradients(want, tensors), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=name)


def test_user_mistakes():
    q, k, v, w1, w2 = inputs(1, 5, 2, 4)
    with pytest.raises(ValueError, match="window=0: it counts the token itself"):
        composed_read(q, k, v, w1, w2, 1.0, 0)
    with pytest.raises(ValueError, match=r"w1 \(1, 5\).*do not fit q \(1, 5, 2, 4\)"):
        composed_read(q, k, v, w1[..., 0], w2, 1.0, 3)
    with pytest.raises(ValueError, match="documents want as many queries as keys"):
        composed_read(q[:, 1:], k, v, w1[:, 1:], w2[:, 1:], 1.0, 3, documents_of([2, 3]))


@pytest.mark.skipif(not has_triton(), reason="all is refused without Triton")
def test_what_the_kernels_do_not_take_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(compose, "_said", set())
    monkeypatch.setattr(torch.version, "hip", None)
    with caplog.at_level(logging.WARNING, logger="nanosprint"):
        assert compose._kernels_serve(torch.bfloat16, 128, 112)
        assert compose._kernels_serve(torch.float16, 32, tuning.COMPOSE_WINDOW)
        assert not caplog.messages
        for _ in range(2):
            assert not compose._kernels_serve(torch.float32, 128, 112)
            assert not compose._kernels_serve(torch.bfloat16, 96, 112)
            assert not compose._kernels_serve(torch.bfloat16, 128, tuning.COMPOSE_WINDOW + 1)
    assert len(caplog.messages) == 3
    assert "windows up to 256, not 257" in caplog.text


def test_the_choice_can_be_traced():
    """In a compiled model it is a constant, and what it logs breaks no graph."""

    def choose(x):
        return x + 1 if compose._kernels_serve(torch.float32, 96, 300) else x - 1

    x = torch.zeros(3)
    assert torch.equal(torch.compile(choose, backend="eager", fullgraph=True)(x), x - 1)


# ---- kernels


def worst(got, want):
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-30))


def on_gpu():
    if not (torch.cuda.is_available() and has_triton()):
        pytest.skip("needs a CUDA device and Triton")


def compare(shape, window, lengths, dtype, *, scale=0.12):
    """Relative errors of the kernels' outputs and gradients, by name; inputs rounded to `dtype` first."""
    narrow = inputs(*shape, dtype=dtype, device="cuda")
    documents = documents_of(lengths, "cuda") if isinstance(lengths, list) else lengths
    tensors, wide = ([t.to(d).requires_grad_() for t in narrow] for d in (dtype, torch.float64))
    got = composed_read(*tensors, scale, window, documents)
    want = compose.composed_read_reference(*wide, scale, window, documents)
    errors = {"out": worst(got, want)}
    for name, a, b in zip(NAMES, gradients(got, tensors), gradients(want, wide), strict=True):
        assert a.dtype == dtype
        errors[name] = worst(a, b)
    return errors


# From the specification: relative Frobenius errors of bf16. Summed over what is rounded once, errors stay near 2^-9.
TOLERANCES = {"out": 5e-3, "q": 1e-2, "w1": 1e-2, "w2": 1e-2, "k": 2e-2, "v": 2e-2}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("shape", "window", "lengths"),
    [
        ((1, 4099, 6, 128), 112, "web"),
        ((3, 1023, 6, 128), 112, "web"),
        ((2, 517, 5, 64), 64, None),
        ((1, 700, 3, 32), 17, [1, 1, 300, 0, 37, 361]),
        ((1, 333, 6, 128), 1, [100, 233]),
        ((2, 257, 2, 128), 256, None),
        ((1, 5, 6, 128), 112, None),
    ],
)
def test_kernels_on_a_gpu(shape, window, lengths, dtype):
    on_gpu()
    if lengths == "web":
        lengths = sample_documents(*shape[:2], None, torch.device("cuda"))
    errors = compare(shape, window, lengths, dtype)
    if window == 1:  # the softmax is constant, and its gradients are rounding errors of zero
        errors = {name: e for name, e in errors.items() if name not in ("q", "k")}
    assert all(e < TOLERANCES[name] for name, e in errors.items()), errors


@pytest.mark.gpu
def test_operator_on_a_gpu():
    """Inputs with strides, the same bits each time, and rows that do not see each other."""
    on_gpu()
    B, S, H, K, window = 2, 301, 6, 64, 50
    documents = sample_documents(B, S, 90, torch.device("cuda"))
    merged = torch.randn(B, S, 3, H, K, device="cuda", dtype=torch.bfloat16)
    q, k, v = (t.detach().requires_grad_() for t in merged.unbind(2))  # the token stride of all three
    w1, w2 = (torch.randn(B, S, H, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    tensors = (q, k, v, w1, w2)
    check_operator(tensors, window, documents)
    with torch.no_grad():
        out = composed_read(*tensors, 0.2, window, documents)
        spoilt = v.clone()
        spoilt[1] = float("nan")  # another row, which is masked or not read at all
        assert torch.equal(composed_read(q, k, spoilt, w1, w2, 0.2, window, documents)[0], out[0])


@pytest.mark.gpu
def test_many_tokens_on_a_gpu():
    """Offsets beyond 31 bits: the last tokens alone must come out the same."""
    on_gpu()
    if torch.cuda.mem_get_info()[0] < 30e9:
        pytest.skip("needs 30 GB of GPU memory")
    T, tail, window = 3_000_000, 1024, 112  # more than 2^31 elements
    q, k, v = (torch.randn(1, T, 6, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    w1, w2 = (torch.randn(1, T, 6, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = composed_read(q, k, v, w1, w2, 0.1, window)[:, -tail:]
    last = (t[:, -tail - window :] for t in (q, k, v, w1, w2))
    assert worst(composed_read(*last, 0.1, window)[:, -tail:], out.double()) < 5e-3  # blocks lie elsewhere


def test_kernel_logic_in_the_interpreter(run_interpreted):
    run_interpreted(__file__)


def interpreted():
    """In fp32, tiles that do not divide the sizes, and a band that needs several."""
    square, mixed = [tuning.Band(16, 16, 1, 1)], [tuning.Band(16, 32, 1, 1)] * 3 + [tuning.Band(32, 16, 1, 1)] * 3
    for bands, cases in ((square * 6, CASES), (mixed, CASES[3:4])):
        tuning.compose_bands = lambda _, bands=bands: tuning.ComposeBands(*bands)
        for B, S, H, window, lengths in cases:
            narrow = inputs(B, S, H, 32, dtype=torch.float32)
            tensors, wide = ([t.to(d).requires_grad_() for t in narrow] for d in (torch.float32, torch.float64))
            got = operator(*tensors, 0.3, window, documents_of(lengths))
            want = by_loops(*wide, 0.3, window, lengths)
            torch.testing.assert_close(got, want.float(), rtol=1e-4, atol=1e-5)
            for name, a, b in zip(NAMES, gradients(got, tensors), gradients(want, wide), strict=True):
                torch.testing.assert_close(a, b.float(), rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
    q, k, v, w1, w2 = inputs(2, 21, 1, 32, dtype=torch.float32)
    merged = torch.stack((q, k, v), 2).unbind(2)
    check_operator([t.detach().requires_grad_() for t in (*merged, w1, w2)], 5, documents_of([3, 18, 20, 1]))


if __name__ == "__main__":
    interpreted()
