"""The table of operators: every case builds and agrees with its formula on a CPU; floors, failures, what is printed."""

import json
import math
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.floors import Ceilings
from benchmarks.harness import device_timing
from benchmarks.inputs import Sizes, first_documents, heads, tiny
from benchmarks.ops import __main__ as program
from benchmarks.ops import attention, head, matrices, mlp, tables
from benchmarks.ops.case import Case, Cost, Library, Operator, error_of, floor_ms, memory_bound
from benchmarks.ops.measure import LATER, add_compiled, awaits_compiling, rows_of, warm_up
from benchmarks.ops.table import table
from nanosprint.model.gpt import GPT
from nanosprint.model.roles import collect_roles
from nanosprint.ops.attention import reference
from nanosprint.optim.muon import matrix_shape
from nanosprint.recipes import load_recipe

HAND = Ceilings(bf16=800e12, fp8=1600e12, copy=4e12)
CPU = torch.device("cpu")


@pytest.mark.parametrize("operator", program.OPERATORS, ids=lambda operator: operator.name)
def test_every_case_agrees_with_its_formula_and_all_rivals_run(operator):
    cases = list(operator.make(tiny()))
    assert cases
    for case in cases:
        assert case.check() <= case.tolerance, case.name
        assert floor_ms(case.costs, HAND) > 0
        for work in (case.ours, case.reference, case.library):
            if not isinstance(work, str):
                (work.work if isinstance(work, Library) else work)()


SAME = (
    "norm",
    "attention",
    "composed",
    "head copies, input",
    "MLP up",
    "MLP d",
    "look-up g",
    "symmetric",
    "b A",
    "Polar",
)


@pytest.mark.parametrize("operator", [o for o in program.OPERATORS if o.name.startswith(SAME)], ids=lambda o: o.name)
def test_eager_forms_return_the_same(operator):
    """One that did less would look fast."""
    allowed = {"MLP down, FP8": 5e-2, "Polar Express": 1e-1}  # in bf16; rounded more often
    for case in operator.make(tiny()):
        made, plain = case.ours(), case.reference()
        if isinstance(plain, torch.Tensor):
            made, plain = (made,), (plain,)
        for ours, eager in zip([t for t in made if t is not None], plain, strict=True):
            ours = ours.amax() if eager.ndim == 0 else ours  # maxima of parts
            assert error_of(ours, eager) <= allowed.get(operator.name, 2e-2), case.name


def test_names_are_unique():
    rows = [(o.name, case.name, case.shape) for o in program.OPERATORS for case in o.make(tiny())]
    assert len({*rows}) == len(rows)


def test_sizes_are_the_record():
    recipe = load_recipe("record")
    with torch.device("meta"):
        model = GPT(recipe.model)
    roles, banks, sizes = collect_roles(model), Counter(), Sizes(tokens=16)
    for name, p in model.named_parameters():
        if roles[name].name.startswith("matrix"):
            banks[matrix_shape(p.shape, roles[name].blocks)] += roles[name].blocks
    assert {(count, *shape) for shape, count in banks.items()} == {*sizes.banks}
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes["head.weight"] == (sizes.dim, sizes.vocab)
    assert shapes["bigram.weight"] == (sizes.pairs, sizes.dim)
    assert shapes["value_tables.weight"] == (sizes.vocab, sizes.tables * sizes.dim)
    third = recipe.plan(848).windows  # of the third stage
    assert (third.short, third.long) == sizes.windows
    mixers = [layer.mixer for layer in recipe.model.layers if layer.mixer is not None]
    assert [m.compose.window for m in mixers if m.compose is not None] == [sizes.compose_window]
    assert recipe.model.softcap == head.CAP
    assert sum(layer.mlp is not None for layer in recipe.model.layers) == sizes.layers


def costs_of(make, sizes):
    return {case.name: case.costs for case in make(sizes)}


def test_floors_by_hand():
    """96 tokens, width 32, 64 hidden units, 128 tokens of vocabulary."""
    (loss,) = costs_of(partial(head.loss, dtype=torch.float8_e5m2), tiny()).values()
    assert floor_ms(loss, HAND) == pytest.approx(1e3 * (2 + 1) * 96 * 128 / 4e12)
    assert memory_bound(loss, HAND)
    (up8,) = costs_of(partial(mlp.fused, "up8"), tiny()).values()
    assert up8 == (Cost(2 * 96 * 32 * 64, 96 * 32 + 64 * 32 + 96 * 64 * 3, "fp8"),)
    (dpre,) = costs_of(partial(mlp.fused, "dpre"), tiny()).values()
    assert dpre[0].nbytes == 2 * (96 * 32 + 64 * 32 + 2 * 96 * 64)
    both = costs_of(attention.rotary, tiny())["forward and backward"]
    assert floor_ms(both, HAND) == pytest.approx(1e3 * 14 * 2 * 96 * 32 / 4e12)


def test_a_floor_is_the_sum_of_passes_each_bound_by_its_own():
    compute, memory = Cost(8e12, 4e9, "fp8"), Cost(8e9, 4e12)
    assert floor_ms((compute,), HAND) == pytest.approx(5)
    assert floor_ms((memory,), HAND) == pytest.approx(1000)
    assert floor_ms((compute, memory), HAND) == pytest.approx(1005)
    assert not memory_bound((compute,), HAND)
    assert memory_bound((compute, memory), HAND)


def test_attention_counts_visible_pairs():
    """Documents of at most 24 tokens; within the window of 8 a token sees 9 keys at most."""
    sizes = tiny()
    lengths = heads(sizes).documents.cu_seqlens.diff().tolist()
    pairs = sum(min(t + 1, 9) for length in lengths for t in range(length))
    costs = costs_of(partial(attention.attend, which=0), sizes)
    assert [cost.flops for cost in costs["forward and backward"]] == [4 * 32 * pairs, 10 * 32 * pairs]


def test_the_first_documents_are_a_case_of_their_own():
    data = heads(tiny())
    tokens, documents = first_documents(data.documents)
    q, k, v = (t.detach().float() for t in data.leaves)
    whole = reference(q, k, v, 0.1, 8, data.documents)
    assert 0 < tokens < 96
    alone = reference(q[:, :tokens], k[:, :tokens], v[:, :tokens], 0.1, 8, documents)
    torch.testing.assert_close(whole[:, :tokens], alone)


def half_elsewhere(loss_and_grad):
    """Gradients right where labels are, half of what they should be elsewhere."""

    def wrong(logits, labels, curve, out, **options):
        losses = loss_and_grad(logits, labels, curve, out, **options)
        kept = out.gather(1, labels.ids)
        out.mul_(0.5).scatter_(1, labels.ids, kept)
        return losses

    return wrong


def scaled(function, factor=1.05):
    def wrong(*args, **options):
        made = function(*args, **options)
        return made * factor if isinstance(made, torch.Tensor) else (made[0] * factor, *made[1:])

    return wrong


@pytest.mark.parametrize(
    ("module", "name", "make", "breaks"),
    [
        (head, "loss_and_grad", partial(head.loss, capped=False), half_elsewhere),
        (head, "scaled_product", head.products, scaled),
        (mlp, "up_relu2", partial(mlp.fused, "up8"), scaled),
        (mlp, "relu2_grad", partial(mlp.fused, "dpre"), scaled),
        (matrices, "polar_express", matrices.polar, scaled),
        (matrices, "gram_poly", matrices.polynomial, scaled),
        (attention, "composed_read", attention.composed, scaled),
        (attention, "qk_norm_rotary", attention.rotary, scaled),
    ],
)
def test_what_is_wrong_is_not_timed(monkeypatch, module, name, make, breaks):
    monkeypatch.setattr(module, name, breaks(getattr(module, name)))
    row = rows_of(Operator("broken", make), tiny(), None)[0]
    assert row["failed"].startswith("WRONG by ")
    assert row["error"] > 1e-2
    assert "ms" not in row
    assert "WRONG [1]" in table([row])


LARGER = Sizes(tokens=64, device="cpu", dim=256, banks=((2, 256, 128), (1, 128, 256)))


def larger(**faults):
    """Muon's case on matrices large enough for the tight tolerance, the rule broken in some way."""
    with pytest.MonkeyPatch.context() as patch:
        for option, value in faults.items():
            patch.setitem(matrices.RULE, option, value)
        (case,) = matrices.muon(replace(LARGER))
    return case


def test_noise_of_cautious_decay_is_no_error(monkeypatch):
    """Signs of near-zero entries differ from the formula's; that alone, were it held against the rule, exceeds."""
    case = larger()
    assert case.tolerance == 1.5e-2
    assert case.check() < 1.2e-2
    monkeypatch.setattr(matrices, "nearer", lambda got, either: either[0])
    assert larger().check() > 2e-2


@pytest.mark.parametrize(
    "fault",
    [
        {"weight_decay": 0.0}, {"weight_decay": 1.1 * matrices.DECAY}, {"decay": "plain"}, {"lr": 1.03 * matrices.LR},
        {"variance_beta": None}, {"orthogonalizer": "ns5"},
    ],
)  # fmt: skip
def test_a_rule_that_is_slightly_off_is_wrong(fault):
    case = larger(**fault)
    assert case.check() > case.tolerance


def test_adam_without_decay_is_wrong(monkeypatch):
    (adam,) = tables.adam(tiny())
    monkeypatch.setattr(tables, "DECAY", 0.0)  # of the formula alone, since the rule is made already
    assert adam.check() > adam.tolerance


def case(ours=lambda: torch.ones(4), error=0.0, **more):
    rest = {"shape": "4", "tolerance": 1e-2, "costs": (Cost(nbytes=4e6),), "reference": "none", "compiled": "none"}
    return Case(ours=ours, check=lambda: error, **{**rest, **more})


def raising():
    raise RuntimeError("no such thing\nsecond line")


def test_failures_cost_no_other_row():
    sizes = tiny()
    (broken,) = rows_of(Operator("broken", lambda sizes: raising()), sizes, HAND)
    assert broken["failed"] == "RuntimeError: no such thing"
    cases = [case(raising), case(error=math.nan), case(reference=raising, library=Library("theirs", raising)), case()]
    late, nan, rival, good = rows_of(Operator("some", lambda sizes: cases), sizes, HAND)
    assert late["failed"] == "RuntimeError: no such thing"
    assert nan["failed"].startswith("WRONG by nan")
    assert rival["ms"] > 0
    assert rival["reference_why"] == rival["library_why"] == "RuntimeError: no such thing"
    assert (good["floor_ms"], good["unit"]) == (pytest.approx(1e-3), "TB/s")
    assert good["share"] == pytest.approx(1e-3 / good["ms"])
    assert good["rate"] == pytest.approx(4e6 / good["ms"] / 1e9)
    text = table([broken, late, nan, rival, good])
    assert text.count("RuntimeError: no such thing") == 2  # by itself, and as what "theirs" said
    assert "theirs: RuntimeError: no such thing." in text


def test_what_is_compiled_comes_later_and_stays_with_its_row():
    sizes, calls = tiny(), []
    operator = Operator("one", lambda sizes: [case(), case(name="b", compiled=lambda: calls.append(1))])
    rows = rows_of(operator, sizes, None)
    assert not calls
    assert [row["compiled_why"] for row in rows] == ["none", LATER]
    assert awaits_compiling(operator, sizes, rows)
    assert not awaits_compiling(operator, replace(sizes, tokens=32), rows)
    add_compiled(operator, sizes, rows)
    assert calls
    assert "compiled_ms" not in rows[0]
    assert rows[1]["compiled_ms"] > 0
    assert not awaits_compiling(operator, sizes, rows)


def test_warm_up_calls_all_and_stumbles_over_none():
    calls = []
    good = [Operator(str(i), lambda sizes: [case(lambda: calls.append(1))] * 2) for i in range(20)]
    warm_up([Operator("broken", lambda sizes: raising()), *good], tiny())
    assert len(calls) == 40


def test_table_of_rows_by_hand():
    row = {
        "operator": "one", "case": "forward", "tokens": 4, "shape": "4 x 4", "ms": 0.5, "p20": 0.4, "p80": 0.6,
        "how": "graph", "error": 2e-3, "floor_ms": 0.4, "share": 0.8, "rate": 3.5, "unit": "TB/s", "reference_ms": 1.25,
        "compiled_why": "none", "library_name": "theirs", "library_ms": 20.0,
    }  # fmt: skip
    lines = table([row, row | {"how": "events", "case": ""}]).splitlines()
    assert lines[2] == (
        "| one, forward | 4 x 4 | 0.500 (graph) | 3.50 TB/s | 0.400 | 80% | 1.25 = 2.50 x | [1] | 20.0 = 40.00 x [2] | "
        "2e-03 |"
    )
    assert lines[3].startswith("| one | 4 x 4 | 0.500 | ")
    assert [line for line in lines[4:] if line] == ["[1] none.", "[2] theirs."]


def test_command_line_on_a_cpu(tmp_path, monkeypatch, capsys):
    doc, out = tmp_path / "doc.md", tmp_path / "rows.jsonl"
    doc.write_text("before\n<!-- ops -->\nnot measured yet\n<!-- /ops -->\nafter\n")
    words = ["--device", "cpu", "--only", "sort,head copies", "--no-compile", "--doc", str(doc), "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["ops", *words])
    program.main()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["operator"] for row in rows] == ["head copies"] * 3 + ["look-ups, sort of the ids"]
    assert all(row["ms"] > 0 and "versions" in row for row in rows)
    text = doc.read_text()
    assert "not measured yet" not in text
    assert text.count("| head copies, ") == 3
    assert text.endswith("<!-- /ops -->\nafter\n")
    assert "so there are no floors" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["ops", "--only", "no such"])
    with pytest.raises(SystemExit):
        program.main()
    assert "--only no such: no operator is called so; there are norm, rotary positions; " in capsys.readouterr().err


def test_only_what_depends_on_tokens_is_repeated(capsys):
    operators = [Operator("a", lambda sizes: [case()]), Operator("b", lambda sizes: [case()], by_tokens=False)]
    rows = program.run(operators, [tiny(), tiny(32)], None, 0.0)
    assert [(row["operator"], row["tokens"]) for row in rows] == [("a", 96), ("b", None), ("a", 32)]
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_docs_have_a_place_for_the_table():
    text = (Path(__file__).parent.parent / "docs/speed.md").read_text()
    assert text.index("<!-- ops -->") < text.index("<!-- /ops -->")


def test_timing_on_a_cpu():
    timing = device_timing(lambda: sum(range(2000)), CPU, budget_ms=1)
    assert timing.how == "host"
    assert 0 < timing.p20 <= timing.ms <= timing.p80


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_timing_on_a_gpu():
    device = torch.device("cuda")
    small, large = torch.ones(8, device=device), torch.ones(2**28, device=device)
    assert device_timing(lambda: [small.add(1) for _ in range(20)], device).how == "graph"
    assert device_timing(lambda: large.add(1), device).how == "events"
    assert device_timing(lambda: small.add(1).item(), device).how == "launches"
    assert torch.randn(4, device=device, generator=tiny(device="cuda").generator).isfinite().all()
