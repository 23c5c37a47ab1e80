"""Rows times rows of signs: operator, kernel and gradient against both rows written out."""

import pytest
import torch

from nanosprint.kernels import has_triton
from nanosprint.ops.embedding import lookup, rows_of
from nanosprint.ops.signed_rows import _rows, signed_lookup, signed_rows


def case(shape=(3, 7), D=20, dtype=torch.float32, ids_dtype=torch.int64, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(11, D, generator=generator).to(dtype)
    signs = 2 * torch.randint(2, (5, D), generator=generator, dtype=torch.int8) - 1
    ids, sign_ids = (torch.randint(n, shape, generator=generator).to(ids_dtype) for n in (11, 5))
    return [t.to(device) for t in (weight, ids, signs, sign_ids)]


def truth(weight, ids, signs, sign_ids):
    pairs = zip(ids.flatten().tolist(), sign_ids.flatten().tolist(), strict=True)
    rows = [weight[i].double() * signs[j].double() for i, j in pairs]
    return torch.stack(rows).view(*ids.shape, -1) if rows else weight.double().new_empty(*ids.shape, weight.size(1))


def check_kernel(device, dtypes):
    from nanosprint.kernels.signed_rows import signed_rows as kernel

    for shape, D in (((3, 7), 20), ((1,), 1), ((2, 4), 64), ((0,), 8), ((5,), 129)):
        for dtype in dtypes:
            for ids_dtype in (torch.int64, torch.int32):
                tensors = case(shape, D, dtype, ids_dtype, device)
                out = torch.full((*shape, D), 9.0, dtype=dtype, device=device)
                kernel(*tensors, out)
                assert torch.equal(out.double(), truth(*tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward(dtype):
    weight, ids, signs, sign_ids = case(dtype=dtype)
    want = truth(weight, ids, signs, sign_ids)
    plain = lookup(weight, rows_of(ids), dtype)
    for got in (signed_lookup(weight, rows_of(ids), signs, sign_ids, dtype), signed_rows(plain, *case(dtype=dtype))):
        assert got.dtype == dtype
        assert torch.equal(got.double(), want)


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_gradient_goes_to_the_plain_rows(backend):
    """From the operator as from the formula; values of the plain rows do not matter."""

    def by_operator(weight, ids, signs, sign_ids):
        return signed_rows(1 + lookup(weight, rows_of(ids)), weight, ids, signs, sign_ids)

    weight, ids, signs, sign_ids = args = case()
    weight.requires_grad_()
    if backend is not None:
        by_operator = torch.compile(by_operator, backend=backend, fullgraph=True)
    up = torch.randn(*ids.shape, weight.size(1), generator=torch.Generator().manual_seed(1))
    (got,) = torch.autograd.grad((by_operator(*args) * up).sum(), weight)
    (want,) = torch.autograd.grad((weight[ids] * signs[sign_ids] * up).sum(), weight)
    torch.testing.assert_close(got, want)
    assert want.abs().max() > 0.1


def test_operator_is_what_its_fake_says():
    weight, ids, signs, sign_ids = case()
    torch.library.opcheck(_rows, (weight, ids, signs, sign_ids, torch.bfloat16))


def test_kernel_interpreted(run_interpreted):
    run_interpreted(__file__)


@pytest.mark.gpu
@pytest.mark.skipif(not (torch.cuda.is_available() and has_triton()), reason="needs a GPU and Triton")
def test_kernel_on_a_gpu():
    check_kernel("cuda", (torch.float32, torch.bfloat16))
    weight, ids, signs, sign_ids = case(dtype=torch.bfloat16, device="cuda")
    got = signed_lookup(weight, rows_of(ids), signs, sign_ids, torch.bfloat16)
    assert torch.equal(got.double(), truth(weight, ids, signs, sign_ids))


if __name__ == "__main__":
    check_kernel("cpu", (torch.float32,))
