"""The engine trains the same on one process and on several, restarts anywhere, and never waits in vain."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from toy import EXACT, GROUPS, assert_same_bits, differ, join, plan, spawn, toy, train

from nanosprint.config import AdamConfig, ParamGroup
from nanosprint.config.schedule import Ahead
from nanosprint.model.roles import collect_roles
from nanosprint.optim import engine as engine_module
from nanosprint.optim import parts as parts_module
from nanosprint.optim.engine import Engine
from nanosprint.optim.parts import update_stacks, update_together

STEPS, HALF = 20, 7  # at half time the group with every=2 is waiting with a gradient
EVERY2 = (replace(GROUPS[0], every=2), *GROUPS[1:])
REPLICATED = tuple(replace(g, comm="replicate") for g in GROUPS)
ROWS = tuple(replace(g, comm="shard_sparse", every=2) if g.role == "embed" else g for g in GROUPS)
CASES = {
    "clipped": (GROUPS, {"grad_clip": 0.05}),
    "turns": (EVERY2, {"lanes": 1}),
    "rows": (ROWS, {"lanes": 1, "skips": (1, 2, 3)}),
    "replicated": (REPLICATED, {"lanes": 1, "grad_clip": 0.05}),
    "absent": (GROUPS, {"skips": (1, 2, 3)}),  # of 4 processes the second has no gradient of `out`, of 2 the first some
    "silent": (GROUPS, {"skips": range(4, 8)}),  # of 2 processes the second has none
}  # fmt: skip


NARROW = tuple(replace(g, storage="bf16+16" if g.role == "matrix" else "bf16") for g in GROUPS if g.role != "soap")
NARROW = (*NARROW[:-1], GROUPS[2], GROUPS[-1])  # SOAP and the scalars in fp32


def narrow(steps=5):
    model, engine = toy(NARROW, dtype=torch.float32)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16, torch.float32}
    losses = train(model, engine, range(steps), lanes=1)
    return model, engine, torch.tensor(losses)


def truth(groups, options):
    model, engine = toy(groups)
    losses = train(model, engine, range(STEPS), **{**options, "lanes": 8})
    return model, torch.tensor(losses, dtype=torch.float64)


def several(rank, processes, folder):
    expected, rounded = torch.load(folder / "expected.pt", weights_only=False)
    join(rank, processes)
    for name, (groups, options) in CASES.items():
        model, engine = toy(groups)
        assert any(part.sharded for part in engine.parts) == (name != "replicated")
        losses = torch.tensor(train(model, engine, range(STEPS), **options), dtype=torch.float64)
        dist.all_reduce(losses)
        assert differ(model, expected[name][0]) < 1e-9, (name, differ(model, expected[name][0]))
        torch.testing.assert_close(losses, expected[name][1], rtol=0, atol=1e-9)
        assert_same_bits(model)
        for part in engine.parts:
            outside = part.bank.data[part.bank.count * part.bank.unit_size :]
            assert not outside.any(), "padding leaked"
            assert not part.bank.grad.any(), "a gradient was not cleared"
    model, _, losses = narrow()
    assert_same_bits(model)
    # Gradients are rounded to bf16 (2^-9) wherever they are added, in another order for every number of processes;
    # one process that takes its lanes one by one or all at once differs by as much (6e-5 here).
    dist.all_reduce(losses)
    torch.testing.assert_close(losses, rounded, rtol=1e-3, atol=0)
    resumed = folder / "2.pt" if processes == 4 else folder / "1.pt"
    model, engine = toy(EVERY2)
    saved = torch.load(resumed, weights_only=True)
    model.load_state_dict(saved["model"])
    engine.restore(saved["engine"])
    train(model, engine, range(HALF, STEPS), lanes=1)
    assert differ(model, expected["turns"][0]) < 1e-9
    model, engine = toy(EVERY2)
    train(model, engine, range(HALF), lanes=1)
    captured = engine.capture(torch.device("cpu") if rank == 0 else None)
    if rank == 0:
        torch.save({"model": model.state_dict(), "engine": captured}, folder / f"{processes}.pt")
    snapshot = [{k: v.clone() for k, v in s.items()} for part in engine.parts for s in part.state()]
    engine.restore(saved["engine"])  # what another number of processes saved at the same step is the same
    for mine, theirs in zip(snapshot, (s for part in engine.parts for s in part.state()), strict=True):
        assert mine.keys() == theirs.keys()
        for key in mine:
            torch.testing.assert_close(mine[key], theirs[key], rtol=1e-6, atol=1e-9)
    dist.destroy_process_group()


def test_one_two_and_four_processes_train_the_same(tmp_path):
    model, engine = toy(EVERY2)
    train(model, engine, range(HALF), lanes=8)
    torch.save({"model": model.state_dict(), "engine": engine.capture(torch.device("cpu"))}, tmp_path / "1.pt")
    expected = {name: truth(*case) for name, case in CASES.items()}
    torch.save((expected, narrow()[2]), tmp_path / "expected.pt")
    spawn(2, several, tmp_path)
    spawn(4, several, tmp_path)
    model, engine = toy(EVERY2)  # and back to one
    saved = torch.load(tmp_path / "4.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    engine.restore(saved["engine"])
    train(model, engine, range(HALF, STEPS), lanes=8)
    assert differ(model, truth(EVERY2, {})[0]) < 1e-9
    named = {name: p.shape for name, p in model.named_parameters()}
    assert saved["engine"]["states"].keys() == named.keys()
    assert {n: s["exp_avg"].shape for n, s in saved["engine"]["states"].items() if n != "scale"} == {
        n: shape for n, shape in named.items() if n != "scale"
    }
    assert saved["engine"]["gradients"].keys() == {"head"}


def test_put_back_is_bit_exact():
    model, engine = toy(EVERY2)
    train(model, engine, range(3))
    before = engine.snapshot()
    before = {**before, "states": [[{k: v.clone() for k, v in s.items()} for s in p] for p in before["states"]]}
    before["gradients"] = {n: g.clone() for n, g in before["gradients"].items()}
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    addresses = [s["exp_avg"].data_ptr() for part in engine.parts for s in part.state()]
    ends = []
    for _ in range(2):
        train(model, engine, range(3, 8))
        ends.append({n: p.detach().clone() for n, p in model.named_parameters()})
        model.load_state_dict(weights)
        engine.put_back(before)
    assert all(torch.equal(ends[0][n], ends[1][n]) for n in weights)
    assert addresses == [s["exp_avg"].data_ptr() for part in engine.parts for s in part.state()]


def test_lower_halves_travel_with_the_weights():
    model, engine, _ = narrow(4)
    saved = engine.capture(torch.device("cpu"))
    assert saved["states"]["qkv"]["mantissa"].shape == model.qkv.shape
    assert saved["states"]["qkv"]["mantissa"].any()
    other, fresh = toy(NARROW, dtype=torch.float32)
    other.load_state_dict(model.state_dict())
    fresh.restore(saved)
    for m, e in ((model, engine), (other, fresh)):
        train(m, e, range(4, 8))
    assert differ(model, other) == 0


def test_put_back_to_before_the_first_step():
    model, engine = toy()
    nothing, weights = engine.snapshot(), {n: p.detach().clone() for n, p in model.named_parameters()}
    train(model, engine, range(4))
    model.load_state_dict(weights)
    engine.put_back(nothing)
    train(model, engine, range(4))
    other, fresh = toy()
    train(other, fresh, range(4))
    assert differ(model, other) == 0


def test_turns():
    """A group with every=2 moves at odd steps by the sum of both gradients; the others' gradients are cleared."""
    model, engine = toy(EVERY2)
    before = model.head.detach().clone()
    train(model, engine, [0])
    assert torch.equal(model.head, before)
    first = model.head.grad.clone()
    assert first.any()
    assert not model.proj.grad.any()
    now, seen = toy(EVERY2)[0], []
    now.load_state_dict(model.state_dict())
    step = engine.step

    def spy(*args):
        seen.append(model.head.grad.clone())
        step(*args)

    engine.step = spy
    train(model, engine, [1])
    rows = torch.randint(11, (8, 5), generator=torch.Generator().manual_seed(1))
    (now.loss_sum(rows) / 40).backward()
    torch.testing.assert_close(seen[0], first + now.head.grad, rtol=1e-12, atol=1e-14)
    assert not model.head.grad.any()


def order(update_order=()):
    _, engine = toy(update_order=update_order)
    return [part.group.role for part in engine._updates]


def test_order_of_updates():
    assert order() == ["head", "embed", "scalar", "soap", "matrix"]
    assert order(("matrix", "scalar"))[:2] == ["matrix", "scalar"]
    assert [part.group.role for part in toy()[1].parts] == ["head", "matrix", "soap", "embed", "scalar"]


@pytest.mark.parametrize("groups", [GROUPS, EVERY2])
def test_small_parts_are_updated_together_as_if_alone(monkeypatch, groups):
    ends, calls = [], []
    monkeypatch.setattr(engine_module, "update_together", lambda *args: calls.append(update_together(*args)))
    for together in (True, False):
        calls.clear()
        if not together:
            monkeypatch.setattr(engine_module, "is_small", lambda *_: False)
        model, engine = toy(groups)
        train(model, engine, range(4))
        ends.append((model, engine.snapshot()["accumulating"], [part.bank.grad.any().item() for part in engine.parts]))
        assert bool(calls) == together
    assert differ(ends[0][0], ends[1][0]) == 0
    assert ends[0][1:] == ends[1][1:]


def test_what_counts_as_small(monkeypatch):
    _, engine = toy()
    due = [part for part in engine._updates if part.due(plan(0))]
    assert [[part.group.role for part in parts] for parts, _ in engine_module._turns(due, plan(0))] == [
        ["head", "embed", "scalar"], ["soap"], ["matrix"],
    ]  # fmt: skip
    ahead = replace(plan(0), ahead=(("embed", Ahead(here=0.0, next=1.0, kept=0.9)),))
    assert [len(parts) for parts, _ in engine_module._turns(due, ahead)] == [2, 1, 1, 1]
    monkeypatch.setattr(parts_module, "TOGETHER", 60)
    assert [len(parts) for parts, _ in engine_module._turns(due, plan(0))] == [1] * 5


def test_stacks_are_updated_together_as_if_alone(monkeypatch):
    """Whether their launches may be shared is asked of the kernels, which are not here: once the answer is yes."""
    matrix = next(g for g in GROUPS if g.role == "matrix")
    two = tuple(replace(matrix, role="soap", lr_scale=2.0) if g.role == "soap" else g for g in GROUPS)
    ends, calls = [], []
    monkeypatch.setattr(engine_module, "update_stacks", lambda *args: calls.append(update_stacks(*args)))
    for together in (True, False):
        calls.clear()
        monkeypatch.setattr(parts_module, "share_launches", lambda *_, answer=together: answer)
        model, engine = toy(two)
        if together:
            ahead = replace(plan(0), ahead=(("soap", Ahead(here=0.0, next=1.0, kept=0.9)),))
            assert [part.group.role for part in parts_module.stacks_together(engine.parts, plan(0))] == [
                "matrix",
                "soap",
            ]
            assert parts_module.stacks_together(engine.parts, ahead) == []
        train(model, engine, range(4))
        ends.append((model, engine.snapshot()["accumulating"], [part.bank.grad.any().item() for part in engine.parts]))
        assert len(calls) == (4 if together else 0)
    assert differ(ends[0][0], ends[1][0]) == 0
    assert ends[0][1:] == ends[1][1:]


def test_clipping_is_torchs():
    groups = tuple(ParamGroup(role=g.role, rule=AdamConfig(eps=1.0), lr=0.1) for g in GROUPS)
    model, engine = toy(groups)
    other, _ = toy(groups)
    train(model, engine, [0], grad_clip=0.05)
    rows = torch.randint(11, (8, 5), generator=torch.Generator().manual_seed(0))
    (other.loss_sum(rows) / 40).backward()
    norm = torch.nn.utils.clip_grad_norm_(list(other.parameters()), 0.05)
    assert norm > 0.06  # so that it does something
    torch.optim.AdamW(other.parameters(), lr=0.1, betas=(0.9, 0.95), eps=1.0, weight_decay=0).step()
    assert differ(model, other) < 1e-12


def test_a_role_without_a_group():
    model, _ = toy()
    with pytest.raises(ValueError, match=r"no group for parameters of role 'soap'"):
        Engine(dict(model.named_parameters()), collect_roles(model), GROUPS[:1] + GROUPS[3:] + GROUPS[1:2], EXACT)


def test_a_group_with_a_rate_of_its_own():
    """The factor is the plan's for every part but the one whose role it names."""
    _, engine = toy()
    now = plan(4, own_factors=(("matrix", 0.25),))
    engine.step(now)
    for part in engine.parts:
        rate = part.optimizer.param_groups[0]["lr"]
        factor = 0.25 if part.group.role == "matrix" else now.lr_factor
        assert rate == part.optimizer.param_groups[0]["base_lr"] * factor
