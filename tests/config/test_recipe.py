"""Recipes as values: hash, proportion, validation."""

from dataclasses import replace

import pytest

from nanosprint.recipes import load_recipe


def test_hash_covers_the_mathematics_only():
    recipe = load_recipe("tiny")
    same = [
        replace(recipe, name="other", source="elsewhere"),
        load_recipe(
            "tiny", {"train.log_every": 7, "train.checkpoint_every": 3, "eval.every": 1, "eval.at_start": True}
        ),
        load_recipe("tiny", {"eval.batch_tokens": 64}),
    ]
    assert {r.hash for r in same} == {recipe.hash}
    different = [{"schedule.lr.floor": 0.2}, {"groups.0.lr": 0.5}, {"eval.tokens": 64}, {"model.qk_norm": False}]
    assert len({load_recipe("tiny", d).hash for d in different} | {recipe.hash}) == 5


def test_num_steps_stretches_every_count_of_steps():
    recipe = load_recipe("gpt2", {"train.num_steps": 1956})
    assert (recipe.train.num_steps, recipe.schedule.lr.warmup_steps) == (1956, 70)
    assert recipe.eval.every == load_recipe("gpt2").eval.every
    assert load_recipe("tiny", {"train.num_steps": 2}).schedule.momentum.warmup_steps == 1


def test_an_explicit_count_wins_over_the_proportion():
    recipe = load_recipe("gpt2", ["train.num_steps=100", "schedule.lr.warmup_steps=9"])
    assert recipe.schedule.lr.warmup_steps == 9


def test_tokens_is_the_sum_over_steps():
    assert load_recipe("gpt2").tokens == 19_560 * 524_288


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.batch_tokens=100"], "train.batch_tokens=100 is not a multiple .* nearest that fits is 128"),
        (["train.lanes=0"], "train.lanes=0 must be at least 1"),
        (["train.num_steps=0"], "train.num_steps=0 must be at least 1"),
        (["model.num_layers=0"], "model.layers is empty"),
        (["model.num_heads=3"], "model.dim=32 is not divisible by model.num_heads=3: try [24] heads"),
        (["model.num_heads=16"], "rotary positions need a head size divisible by 4, not 2"),
        (["model.vocab_size=0"], "model.vocab_size=0"),
        (["model.tied_head=true"], "would zero the embedding"),
        (["model.layers.0.mixer.value_residual=true"], "first attention has no earlier values"),
        (["eval.batch_tokens=31"], "eval.batch_tokens=31 is less than one row of eval.seq_len=32"),
        (["eval.stride=0"], "eval.stride=0 must lie between 1 and eval.seq_len=32"),
        (["groups=[]"], "groups is empty"),
        (["data.epochs=0"], r"data.epochs=0.0 must be positive"),
        (["schedule.lr.cooldown_steps=99"], "do not fit"),
        (
            ['model.layers.0.join=[{"source": "a"}]'],
            r"model.layers.0.join.0 reads source 'a' before anything writes it",
        ),
        (["model.layers.0.tap=a", "model.layers.1.tap=a"], "model.layers.1 writes tap 'a', which was already written"),
        (["model.dim=1e9x"], "model.dim='1e9x': expected a whole number"),
        (["model.dmi=8"], "unknown key 'model.dmi': did you mean 'model.dim'"),
        (["model.num_layer=8"], "did you mean 'model.num_layers'"),
    ],
)
def test_what_cannot_work_is_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        load_recipe("tiny", overrides)


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        (
            "longwindow",
            ["model.document_start=60000"],
            "model.document_start=60000 is no token of model.vocab_size=50304",
        ),
        ("gpt2", ['schedule.windows={"start": 64, "end": 64}'], "schedule.windows is set, but every layer sees every"),
        ("longwindow", ["schedule.windows=none"], "window=long, but no schedule.windows says how far"),
        ("longwindow", ["schedule.windows.short_fraction=0"], "short_fraction=0.0: it must be above 0 and at most 1"),
        ("longwindow", ["schedule.windows.end=0"], "schedule.windows.end=0: it must be at least 1"),
        ("sub3", ["model.dim=24", "model.num_heads=3"], "products in FP8 want sizes that are multiples of 16"),
        ("sub3", ["precision.fp8_head.x=0"], "precision.fp8_head.x=0.0: it must be positive"),
        ("residuals", ["model.softcap.cap=-1"], "model.softcap.cap=-1.0: it must be positive"),
        ("sub3", ["model.softcap.width=0"], "model.softcap.width=0.0: it must be positive"),
        ("sub3", ["model.attn_scale=0"], "model.attn_scale=0.0: it must be positive"),
        ("residuals", ["schedule.momentum.end=1"], "schedule.momentum.end=1.0: it must be at least 0 and below 1"),
        ("residuals", ["model.tied_head=true", "model.init.head=as_linear"], "groups have the role 'head', but .*tied"),
        ("muon", ["groups.1.role=matrix"], "groups name the role 'matrix' more than once"),
        ("muon", ["groups.0.rule.momentum=1"], "groups.0.rule.momentum=1.0: it must be at least 0 and below 1"),
        ("muon", ["groups.1.rule.betas=[0.9, 1.0]"], r"groups.1.rule.betas=\(0.9, 1.0\): it must be at least 0"),
        ("muon", ["groups.0.weight_decay=-1"], "groups.0.weight_decay=-1.0: it must be 0 or more"),
        ("muon", ["model.value_tables=2"], "model.value_tables wants an embedding with a rate of its own"),
        ("gpt2", ["eval.tokens=0"], "eval.tokens=0: it must be at least 1, or none"),
        # Switches that would be turned without any effect.
        ("record", ["schedule.lr.floor=0.2"], "schedule.lr has no say beside schedule.stages, .* set schedule.lr={}"),
        ("gpt2", ["model.rotary.fraction=0.5"], "model.rotary is set, but model.positions=learned has no use for it"),
        ("residuals", ["model.softcap.width=5"], "model.softcap.kind=tanh has no shift and no width"),
        ("modern", ["model.init.head_std=0.01"], "model.init.head_std=0.01 is for head=normal, not as_linear"),
    ],
)
def test_contradictions_are_refused_with_the_reason(name, overrides, message):
    with pytest.raises(ValueError, match=message):
        load_recipe(name, overrides)


def test_learned_positions_end():
    with pytest.raises(ValueError, match=r"eval.seq_len=2048 exceeds model.seq_len=1024"):
        load_recipe("gpt2", ["eval.seq_len=2048"])


def test_unknown_recipe_names_the_nearest():
    with pytest.raises(ValueError, match=r"unknown recipe 'gtp2': did you mean 'gpt2'.*known: "):
        load_recipe("gtp2")


def test_plans_of_groups_that_look_ahead():
    """Steps 2 to 11 of 20; the strength follows the rate of the group's own next turn and ends with the span."""
    words = ['groups.0.rule.lookahead={"strength": 0.5, "decay": 0.9, "end": 0.6}', "groups.0.cooldown=0.6"]
    recipe = load_recipe("tiny", words)
    role = recipe.groups[0].role
    plans = [recipe.plan(step) for step in range(20)]
    assert [plan.step for plan in plans if plan.ahead] == list(range(2, 12))
    for plan in plans[2:12]:
        ((name, ahead),) = plan.ahead
        assert (name, ahead.kept, ahead.here) == (role, 0.9, 0.5 * plan.factor_of(role))
        following = plans[plan.step + 1]
        assert ahead.next == (dict(following.ahead)[role].here if following.ahead else 0.0)
    assert plans[11].ahead[0][1].next == 0.0
    assert plans[11].factor_of(role) < plans[8].factor_of(role)
    slow = load_recipe("tiny", [*words, "groups.0.every=3"])
    assert slow.plan(4).ahead[0][1].next == slow.plan(7).ahead[0][1].here
    assert slow.plan(9).ahead[0][1].next == 0.0
    assert recipe.hash != load_recipe("tiny").hash


def test_plans_of_a_head_with_the_last_gradient_alone():
    """It counts for all steps since the update before, and the other steps make none."""
    words = ["groups.2.every=3", "groups.2.gradient=last"]
    recipe = load_recipe("tiny", words)
    assert [recipe.plan(step).head_counts for step in range(7)] == [0, 0, 3, 0, 0, 3, 0]
    assert recipe.eval_plan(2).head_counts is None
    assert [load_recipe("tiny", words[:1]).plan(step).head_counts for step in (1, 2)] == [None, None]
    assert recipe.hash != load_recipe("tiny", words[:1]).hash
    for wrong in (["groups.2.gradient=last"], ["groups.1.every=2", "groups.1.gradient=last"]):
        with pytest.raises(ValueError, match=r"gradient=last: it must be sum, but for a group head with every above 1"):
            load_recipe("tiny", wrong)


def test_plans_of_groups_with_a_mixture_of_momenta():
    """The mean age goes in a line over the run; other groups have none, and neither has a recipe without."""
    recipe = load_recipe("tiny", ['groups.0.rule.mixture={"start": 8, "end": 2}'])
    last = recipe.train.num_steps - 1
    for step, age in ((0, 8.0), (last, 2.0), (5, 8 - 6 * 5 / last)):
        assert dict(recipe.plan(step).ages) == {recipe.groups[0].role: pytest.approx(age)}
    assert recipe.hash != load_recipe("tiny").hash
    assert load_recipe("tiny").plan(0).ages == ()
    words = [f'groups.{i}.rule.mixture={{"start": {8 - i}, "longest": 50}}' for i in (0, 1)]
    assert [age for _, age in load_recipe("fast", words).plan(0).ages] == [8.0, 7.0]


@pytest.mark.parametrize(
    ("option", "change", "message"),
    [
        ("radius", '"floor": -1', r"groups\.0\.rule\.radius\.floor=-1\.0: it must be 0"),
        ("radius", '"outputs": "cols"', r"groups\.0\.rule\.radius\.outputs.*cols"),
        ("basis", '"beta": 1', r"groups\.0\.rule\.basis\.beta=1\.0: it must be at least 0 and below 1"),
        ("basis", '"refresh_every": 0', r"groups\.0\.rule\.basis\.refresh_every=0: it must be at least 1"),
        ("mixture", '"end": 0.1', r"groups\.0\.rule\.mixture\.end=0\.1: it must be above shortest=1\.0"),
        ("mixture", '"count": 1', r"groups\.0\.rule\.mixture\.count=1: it must be between 2 and 64"),
    ],
)
def test_options_of_muon_that_cannot_work(option, change, message):
    with pytest.raises(ValueError, match=message):
        load_recipe("tiny", [f"groups.0.rule.{option}={{{change}}}"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("strength=0", r"groups\.0\.rule\.lookahead\.strength=0\.0: it must be positive"),
        ("decay=1.0", r"groups\.0\.rule\.lookahead\.decay=1\.0: it must be at least 0 and below 1"),
        ("start=0.8", r"groups\.0\.rule\.lookahead\.start=0\.8: it must be between 0 and end=0\.7"),
        ("end=1.5", r"groups\.0\.rule\.lookahead\.end=1\.5: it must be at most 1"),
    ],
)
def test_a_look_ahead_that_cannot_work(change, message):
    name, value = change.split("=")
    with pytest.raises(ValueError, match=message):
        load_recipe("tiny", [f'groups.0.rule.lookahead={{"{name}": {value}}}'])
