"""Banks are views of one storage that nobody else can tell from separate tensors."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nanosprint.optim.bank import Bank


def parameters(*shapes):
    return {f"p{i}": nn.Parameter(torch.randn(shape)) for i, shape in enumerate(shapes)}


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize(
    ("shapes", "unit"), [([(3, 5)] * 3, (3, 5)), ([(6, 5), (3, 5), (9, 5)], (3, 5)), ([(7, 3), (), (5,), (1, 1)], ())]
)
def test_parameters_become_views_and_keep_their_values(shapes, unit, shards):
    held = parameters(*shapes)
    before = {n: p.detach().clone() for n, p in held.items()}
    bank = Bank(held, unit, torch.float32, shards)
    for name, p in held.items():
        assert torch.equal(p, before[name])
        assert p.untyped_storage().data_ptr() == bank.data.untyped_storage().data_ptr()
        assert p.grad.untyped_storage().data_ptr() == bank.grad.untyped_storage().data_ptr()
        assert p.is_contiguous()
    used = sum(p.numel() for p in held.values())
    if shards == 1 and unit:
        assert bank.data.numel() == used  # no padding
    marked = torch.zeros_like(bank.data)
    for view in bank.views(marked).values():
        view += 1
    assert marked.sum() == used
    assert marked.max() == 1  # no two overlap
    assert not bank.data[marked == 0].any()
    owned = [bank.owned(bank.data, i) for i in range(shards)]
    assert torch.equal(torch.cat(owned).reshape(-1), bank.data[: bank.count * bank.unit_size])
    assert torch.equal(torch.cat([bank.shard(bank.data, i) for i in range(shards)]), bank.data)
    assert len({bank.shard(bank.data, i).numel() for i in range(shards)}) == 1


def test_more_shards_than_units():
    bank = Bank(parameters((2, 3), (2, 3)), (2, 3), torch.float32, shards=4)
    assert [len(bank.units_of(i)) for i in range(4)] == [1, 1, 0, 0]
    assert bank.owned(bank.data, 3).shape == (0, 2, 3)


def test_numbers_start_at_round_addresses():
    bank = Bank(parameters((7, 3), (5,), (2,)), (), torch.bfloat16, shards=3)
    assert all((p.data_ptr() - bank.data.data_ptr()) % 128 == 0 for p in (s.parameter for s in bank.slots))
    assert bank.shard(bank.data, 1).storage_offset() * 2 % 128 == 0


def test_storage_of_another_type():
    held = parameters((4, 4), (4, 4))
    before = held["p0"].detach().clone()
    held["p0"].grad = torch.ones(4, 4)
    Bank(held, (4, 4), torch.bfloat16, 1)
    assert held["p0"].dtype == held["p0"].grad.dtype == torch.bfloat16
    assert torch.equal(held["p0"].detach(), before.bfloat16())
    assert not held["p0"].grad.any()


def test_gradients_gather_in_place():
    """Also where a parameter is used twice, and over several backward passes."""
    held = parameters((4, 4), (4, 4))
    bank = Bank(held, (4, 4), torch.float32, 1)
    x = torch.randn(3, 4)
    expected = torch.zeros(4, 4)
    for _ in range(2):
        (F.linear(F.linear(x, held["p0"]), held["p0"]).square().sum() + held["p1"].sum()).backward()
        free = held["p0"].detach().clone().requires_grad_()
        F.linear(F.linear(x, free), free).square().sum().backward()
        expected += free.grad
    assert held["p0"].grad is bank.grads["p0"]
    torch.testing.assert_close(bank.grad[:16].view(4, 4), expected)
    assert torch.equal(bank.grad[16:].view(4, 4), torch.full((4, 4), 2.0))
    bank.grad.zero_()
    assert not held["p0"].grad.any()


def test_a_compiled_model_over_a_bank():
    """One graph, no recompilation when the storage changes, the eager gradients."""
    torch._dynamo.reset()
    held = parameters((4, 4), (4, 4), (8, 4))
    bank = Bank(held, (4, 4), torch.float64, 1)

    def loss(x):
        return F.linear(torch.tanh(F.linear(F.linear(x, held["p0"]), held["p1"])), held["p2"]).square().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=False, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            x = torch.randn(3, 4, dtype=torch.float64)
            compiled(x).backward()
            got = bank.grad.clone()
            bank.grad.zero_()
            loss(x).backward()
            torch.testing.assert_close(got, bank.grad)
            bank.data -= 0.01 * bank.grad
            bank.grad.zero_()


def test_split_and_join():
    bank = Bank(parameters((6, 5), (3, 5), (3, 5)), (3, 5), torch.float32, shards=3)
    whole = torch.randn(4, 3, 5)
    parts = bank.split(whole)
    assert [tuple(v.shape) for v in parts.values()] == [(6, 5), (3, 5), (3, 5)]
    assert torch.equal(parts["p0"][3:], whole[1])
    assert torch.equal(bank.join(parts), whole)
    rows = torch.randn(4, 3, 1)
    assert [tuple(v.shape) for v in bank.split(rows).values()] == [(2, 3, 1), (1, 3, 1), (1, 3, 1)]
    assert torch.equal(bank.join(bank.split(rows)), rows)
    numbers = Bank(parameters((3, 3), (), (5,)), (), torch.float32, shards=2)
    values = numbers.join({"p0": torch.ones(3, 3), "p1": torch.tensor([2.0]), "p2": torch.full((5,), 3.0)})
    assert values.shape == (numbers.count,)
    assert values.sum() == 9 + 2 + 15
    assert torch.equal(numbers.join(numbers.split(values)), values)


def test_what_does_not_fit():
    with pytest.raises(ValueError, match=r"p1 of shape \(4, 5\) is no whole number of units \(3, 5\)"):
        Bank(parameters((3, 5), (4, 5)), (3, 5), torch.float32, 1)
    bank = Bank(parameters((6, 5)), (3, 5), torch.float32, 1)
    with pytest.raises(ValueError, match=r"p0 has shape \(6, 5\), but a value of shape \(9, 5\) was saved for it"):
        bank.join({"p0": torch.zeros(9, 5)})
