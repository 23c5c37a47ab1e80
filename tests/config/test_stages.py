"""Stages of a schedule: the speedrun's record #89 step by step, worked out by hand, and what is refused."""

from dataclasses import replace

import pytest

from nanosprint.config import LossWeights, MomentumSchedule, Schedule, Stage, StageSchedule, Windows
from nanosprint.config.edit import from_dict, to_dict
from nanosprint.config.recipe import Recipe
from nanosprint.recipes import load_recipe

BLOCK = 128
EVERY_BORDER = (0, 422, 423, 846, 847, 1269, 1270, 1284)


def stage(tokens, longest, windows, **rest):
    short, long = windows
    return Stage(
        batch_tokens=tokens, max_document=longest, windows=Windows(short=short * BLOCK, long=long * BLOCK), **rest
    )


STAGES = StageSchedule(
    stages=(
        stage(
            131_072,
            896,
            (1, 3),
            loss=LossWeights(tokens=(1, 0.5, 0.25), prefix=0.25),
            loss_end=LossWeights(tokens=(1, 0.5, 0), prefix=0.25),
        ),
        stage(
            262_144,
            2048,
            (3, 7),
            lr=1.52,
            loss=LossWeights(tokens=(1, 0.5), prefix=0.25),
            loss_end=LossWeights(tokens=(1, 0), prefix=0),
        ),
        stage(393_216, 2048, (5, 11), lr=1.73),
    ),
    extension=stage(393_216, 2048, (6, 13)),
    extension_steps=15,
    eval_windows=Windows(short=6 * BLOCK, long=20 * BLOCK),
    split_stage=2,
)


@pytest.fixture(scope="module")
def record() -> Recipe:
    base = load_recipe("tiny")
    momentum = MomentumSchedule(warmup_steps=300, cooldown_steps=50)
    return replace(
        base,
        model=replace(base.model, document_start=256),
        data=replace(base.data, order="documents"),
        train=replace(base.train, num_steps=1285, batch_tokens=393_216, lanes=8),
        schedule=Schedule(momentum=momentum, stages=STAGES),
        eval=replace(base.eval, seq_len=262_144, batch_tokens=262_144),
    ).validate()


def test_total_and_borders(record):
    assert record.tokens == 338_821_120
    assert [(s.start, s.end) for s in STAGES.spans(1285)] == [(0, 423), (423, 847), (847, 1270), (1270, 1285)]
    rows = [16_384, 16_384, 32_768, 32_768, 49_152, 49_152, 49_152, 49_152]
    plans = [record.plan(step) for step in EVERY_BORDER]
    assert [p.seq_len for p in plans] == rows
    assert [p.batch_tokens for p in plans] == [8 * r for r in rows]
    assert [p.max_document for p in plans] == [896] * 2 + [2048] * 6
    assert [p.windows.long // BLOCK for p in plans] == [3, 3, 7, 7, 11, 11, 13, 13]
    assert [p.windows.short // BLOCK for p in plans] == [1, 1, 3, 3, 5, 5, 6, 6]


@pytest.mark.parametrize(
    ("step", "factor"),
    [
        *((0, 1.0), (422, 1.0), (423, 1.52), (508, 1.52), (846, 0.9123)),
        *((847, 1.0271), (1000, 0.7098), (1269, 0.1521), (1270, 0.15), (1284, 0.15)),
    ],
)
def test_rate(record, step, factor):
    assert record.plan(step).lr_factor == pytest.approx(factor, abs=5e-5)


def test_rate_is_the_formula(record):
    for step in range(1285):
        multiplier = 1.0 if step < 423 else 1.52 if step < 847 else 1.73
        t = min(max((step - 508) / 762, 0), 1)
        assert record.plan(step).lr_factor == pytest.approx(multiplier * (1 - t) + 0.15 * t, rel=1e-12)


def test_momentum_is_the_formula(record):
    for step in range(1285):
        expected = 0.85 + 0.10 * step / 300 if step < 300 else 0.95
        if step > 1235:
            expected = 0.95 - 0.10 * (step - 1235) / 50
        assert record.plan(step).momentum == pytest.approx(expected, rel=1e-12)
    known = {0: 0.85, 299: 0.85 + 0.1 * 299 / 300, 300: 0.95, 1235: 0.95, 1236: 0.948, 1284: 0.852}
    for step, expected in known.items():
        assert record.plan(step).momentum == pytest.approx(expected, rel=1e-12)


def test_losses_ramp_and_never_arrive(record):
    def at(step):
        loss = record.plan(step).loss
        return (*loss.tokens, loss.prefix)

    assert at(0) == (1, 0.5, 0.25, 0.25)
    assert at(211) == pytest.approx((1, 0.5, 0.25 * 212 / 423, 0.25))
    assert at(422) == pytest.approx((1, 0.5, 0.25 / 423, 0.25))
    assert at(423) == (1, 0.5, 0.25)
    assert at(846) == pytest.approx((1, 0.5 / 424, 0.25 / 424))
    assert at(847) == at(1284) == (1, 0)


def test_rotary_follows_the_windows_so_far(record):
    blocks = [tuple(w // BLOCK for w in record.plan(step).yarn) for step in EVERY_BORDER]
    assert blocks == [(3,)] * 2 + [(3, 7)] * 2 + [(3, 7, 11)] * 2 + [(3, 7, 11, 13)] * 2
    same = replace(STAGES, extension=STAGES.stages[2])
    assert same.long_windows(1284, 1285) == (384, 896, 1408)


@pytest.mark.parametrize(("steps", "first"), [(1285, 847), (1285 + 3, 849), (15 + 9, 7)])
def test_split_is_at_an_odd_step(steps, first):
    """1273 scheduled steps: stage 2 starts at 849; 9: at 6, which is even."""
    split = [STAGES.is_split(step, steps) for step in range(steps)]
    assert split == [step >= first for step in range(steps)]
    assert not any(replace(STAGES, split_stage=None).is_split(step, steps) for step in range(steps))


def test_validation_plan(record):
    for step in (0, 250, 500, 847, 1250):
        assert record.eval_plan(step) == replace(
            record.plan(step), batch_tokens=262_144, seq_len=262_144, max_document=262_144, loss=None
        )
    last, end = record.eval_plan(1284), record.eval_plan(1285)
    assert (last.windows.short, last.windows.long) == (6 * BLOCK, 13 * BLOCK)
    assert (end.windows.short, end.windows.long) == (6 * BLOCK, 20 * BLOCK)
    assert end.yarn == last.yarn
    assert end.loss is None


def test_plain_recipes_have_no_weights():
    recipe = load_recipe("tiny")
    assert recipe.plan(3).loss is None
    assert recipe.eval_plan(20).windows is None
    assert (recipe.max_batch_tokens, recipe.max_seq_len) == (512, 32)


def test_longest_row_and_largest_batch(record):
    assert record.max_batch_tokens == 393_216
    assert record.max_seq_len == 262_144
    assert replace(record, eval=replace(record.eval, seq_len=4096)).max_seq_len == 49_152


def test_a_third_of_the_steps(record):
    """Shares and fractions scale by themselves; the extension is set by hand, as 15 x 313 / 1285 would round to 3."""
    third = record.with_num_steps(313)
    assert third.schedule.stages.extension_steps == 3
    assert (third.schedule.momentum.warmup_steps, third.schedule.momentum.cooldown_steps) == (73, 12)
    stages = replace(third.schedule.stages, extension_steps=7)
    third = replace(third, schedule=replace(third.schedule, stages=stages)).validate()
    assert [s.end - s.start for s in stages.spans(313)] == [102, 102, 102, 7]
    assert third.tokens == 102 * (131_072 + 262_144) + 109 * 393_216  # 83.0 M
    assert third.plan(122).lr_factor == 1.52  # int(306 x 0.4)
    assert third.plan(123).lr_factor < 1.52


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_very_short_runs_work(record, steps):
    short = record.with_num_steps(steps).validate()
    plans = [short.plan(step) for step in range(steps)]
    assert all(0 < p.lr_factor <= 1.73 for p in plans)
    assert all(p.yarn for p in plans)
    short.eval_plan(steps)


def test_stages_keep_their_hash_through_json(record):
    again = from_dict(Recipe, to_dict(record))
    assert again.hash == record.hash
    assert again.plan(846) == record.plan(846)


def test_other_orders_keep_their_rows():
    base = load_recipe("tiny")
    stages = replace(STAGES, stages=(stage(256, 8, (1, 3)), stage(512, 8, (1, 3))), extension_steps=0, split_stage=None)
    stages = replace(stages, extension=stages.stages[1])
    recipe = replace(base, schedule=Schedule(stages=stages)).validate()
    assert [(p.batch_tokens, p.seq_len, p.max_document) for p in (recipe.plan(0), recipe.plan(19))] == [
        (256, 32, None),
        (512, 32, None),
    ]


def with_stage(number, **changes):
    stages = list(STAGES.stages)
    stages[number] = replace(stages[number], **changes)
    return replace(STAGES, stages=tuple(stages))


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (replace(STAGES, stages=()), "stages is empty"),
        (with_stage(1, share=0), r"schedule\.stages\.stages\.1\.share=0 must be at least 1"),
        (with_stage(0, max_document=0), r"stages\.0\.max_document=0 must be at least 1"),
        (with_stage(1, batch_tokens=1001), r"stages\.1\.batch_tokens=1001 .* train\.lanes = 8: the nearest .* is 1000"),
        (with_stage(2, batch_tokens=524_288), r"train\.batch_tokens=393216, but the largest .* has 524288"),
        (with_stage(0, lr=0.0), r"stages\.0\.lr=0\.0 must be positive"),
        (with_stage(0, windows=Windows(short=5, long=4)), r"windows: short=5 must lie between 1 and long=4"),
        (with_stage(0, loss=LossWeights(tokens=())), r"loss\.tokens=\[\]: the first"),
        (with_stage(0, loss=LossWeights(tokens=(0.0, 1.0))), r"loss\.tokens=\[0\.0, 1\.0\]: the first"),
        (with_stage(0, loss=LossWeights(tokens=(1.0, -0.5))), r"weight -0\.5 must be 0 or more"),
        (with_stage(0, loss_end=LossWeights(tokens=(1.0,))), r"loss_end\.tokens has 1 weights and .* 3"),
        (replace(STAGES, split_stage=3), r"split_stage=3: it must be none, or a stage's number, 0 to 2"),
        (replace(STAGES, extension_steps=1285), r"extension_steps=1285: it must be 0 to 1284"),
        (replace(STAGES, cooldown=1.5), r"cooldown=1\.5: it must be between 0 and 1"),
        (replace(STAGES, eval_windows=Windows(short=0, long=4)), r"eval_windows: short=0"),
    ],
)
def test_what_cannot_work_is_refused(record, stages, message):
    with pytest.raises(ValueError, match=message):
        replace(record, schedule=replace(record.schedule, stages=stages)).validate()


def test_what_does_not_go_together_is_refused(record):
    with pytest.raises(ValueError, match=r"set model\.document_start"):
        replace(record, model=replace(record.model, document_start=None)).validate()
    windows = load_recipe("longwindow").schedule.windows
    with pytest.raises(ValueError, match=r"schedule\.windows has no say"):
        replace(record, schedule=replace(record.schedule, windows=windows)).validate()
    with pytest.raises(ValueError, match=r"model\.rotary\.yarn follows"):
        load_recipe("tiny", ["model.rotary.yarn=true"])
    with pytest.raises(ValueError, match="learned positions reach"):
        replace(record, model=replace(record.model, positions="learned"), eval=load_recipe("tiny").eval).validate()
    with pytest.raises(ValueError, match="step=1285: the run has 1285 steps"):
        record.plan(1285)


def test_a_groups_own_cooldown(record):
    """Against the formula; of 1,270 scheduled steps 0.4 begin at step 762, 1.0 at step 0 and 0.0 never."""
    shares = {"matrix": 0.4, "head": 1.0, "embed": 0.0}
    groups = tuple(replace(record.groups[0], role=role, cooldown=share) for role, share in shares.items())
    recipe = replace(record, groups=(*groups, replace(record.groups[0], role="gate"))).validate()
    for step in (0, 1, 422, 423, 508, 509, 761, 762, 763, 1269, 1270, 1284):
        plan = recipe.plan(step)
        multiplier = 1.0 if step < 423 else 1.52 if step < 847 else 1.73
        for role, start in (("matrix", 762), ("head", 0), ("embed", 1270), ("gate", 508)):
            t = min(max((step - start) / max(1, 1270 - start), 0), 1)
            expected = multiplier * (1 - t) + 0.15 * t if step < 1270 else 0.15
            assert plan.factor_of(role) == pytest.approx(expected, rel=1e-12), (step, role)
        assert plan.lr_factor == record.plan(step).lr_factor
    assert record.plan(0).own_factors == ()


def test_a_cooldown_that_cannot_work(record):
    groups = (replace(record.groups[0], cooldown=1.5), *record.groups[1:])
    with pytest.raises(ValueError, match=r"groups\.0\.cooldown=1\.5: it must be between 0 and 1, or none"):
        replace(record, groups=groups).validate()
