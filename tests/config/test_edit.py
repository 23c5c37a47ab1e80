"""Overrides are strict, JSON goes both ways, differences name every key."""

import pytest

from nanosprint.config import AdamConfig, MuonConfig, Recipe
from nanosprint.config.edit import apply_overrides, diff, diff_lines, from_dict, parse_overrides, to_dict
from nanosprint.recipes import all_recipes, load_recipe


@pytest.mark.parametrize("name", list(all_recipes()))
def test_every_recipe_survives_json(name):
    recipe = load_recipe(name)
    assert from_dict(Recipe, to_dict(recipe)) == recipe


def test_union_of_dataclasses_keeps_its_class():
    recipe = load_recipe("tiny")
    kinds = [group["rule"]["kind"] for group in to_dict(recipe)["groups"]]
    assert kinds == ["MuonConfig", "AdamConfig", "AdamConfig", "AdamConfig"]
    rules = [type(group.rule) for group in from_dict(Recipe, to_dict(recipe)).groups]
    assert rules == [MuonConfig, AdamConfig, AdamConfig, AdamConfig]


@pytest.mark.parametrize(
    ("key", "text", "read"),
    [
        ("schedule.lr.floor", "0.25", lambda r: r.schedule.lr.floor == 0.25),
        ("schedule.lr.floor", "0", lambda r: r.schedule.lr.floor == 0.0),
        ("eval.tokens", "none", lambda r: r.eval.tokens is None),
        ("model.positions", "none", lambda r: r.model.positions == "none"),
        ("eval.tokens", "1_024", lambda r: r.eval.tokens == 1024),
        ("model.qk_norm", "off", lambda r: r.model.qk_norm is False),
        ("model.qk_norm", "true", lambda r: r.model.qk_norm is True),
        ("model.layers.1.mixer", "none", lambda r: r.model.layers[1].mixer is None and r.model.layers[0].mixer),
        ("groups.1.rule.betas", "[0.5, 0.9]", lambda r: r.groups[1].rule.betas == (0.5, 0.9)),
        ("schedule.lr.shape", "cosine", lambda r: r.schedule.lr.shape == "cosine"),
        ("model.softcap", '{"cap": 15}', lambda r: r.model.softcap.cap == 15.0),
    ],
)
def test_values_are_read_by_type(key, text, read):
    assert read(apply_overrides(load_recipe("tiny"), {key: text}))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model.dmi", "3", "unknown key 'model.dmi': did you mean 'model.dim'"),
        ("schedule.lr.flor", "3", "did you mean 'schedule.lr.floor'"),
        ("model.layers.7.tap", "x", "unknown key 'model.layers.7.tap'"),
        ("schedule.lr.floor", "low", "schedule.lr.floor='low': expected a number"),
        ("train.log_every", "1.5", "train.log_every=1.5: expected a whole number"),
        ("train.log_every", "true", "expected a whole number"),
        ("model.qk_norm", "maybe", "expected true or false"),
        ("schedule.lr.shape", "cosin", "did you mean 'cosine'"),
        ("groups.1.rule.betas", "[0.5]", "expected a list of 2 values"),
        ("groups.0", "7", "expected a ParamGroup"),
        ("groups.0.rule", '{"kind": "Adm"}', "expected one of AdamConfig, MuonConfig, RowAdagradConfig, SoapConfig"),
        ("model.softcap", '{"cup": 15}', "did you mean 'model.softcap.cap'"),
    ],
)
def test_mistakes_are_named(key, value, message):
    with pytest.raises(ValueError, match=message.replace("[", r"\[").replace("?", r"\?")):
        apply_overrides(load_recipe("tiny"), {key: value})


def test_missing_field_in_json_is_named():
    data = to_dict(load_recipe("tiny"))
    del data["train"]["batch_tokens"]
    with pytest.raises(ValueError, match=r"train.*batch_tokens"):
        from_dict(Recipe, data)


@pytest.mark.parametrize("words", [["model.dim"], ["=3"], ["a=1", "a=2"]])
def test_malformed_words(words):
    with pytest.raises(ValueError, match="override"):
        parse_overrides(words)


def test_equals_sign_in_a_value_is_kept():
    assert parse_overrides(["a.b=c=d"]) == {"a.b": "c=d"}


def test_diff_names_each_changed_leaf():
    old = to_dict(load_recipe("tiny"))
    new = to_dict(load_recipe("tiny", {"schedule.lr.floor": 0.5, "groups.1.lr": 7.0}))
    assert diff(old, new) == [("schedule.lr.floor", 0.1, 0.5), ("groups.embed.lr", 0.1, 7.0)]


def test_diff_of_items_that_change_alike_is_one_line():
    old = to_dict(load_recipe("tiny", {"model.num_layers": 5}))
    changed = {"model.num_layers": 5, **{f"model.layers.{i}.mlp.hidden": 64 for i in (0, 1, 3)}}
    new = to_dict(load_recipe("tiny", {**changed, "model.layers.4.tap": "a", "model.norm_eps": 0.5}))
    assert diff_lines(old, new) == [
        "model.layers.0-1,3.mlp.hidden: 128 -> 64",
        'model.layers.4.tap: null -> "a"',
        "model.norm_eps: null -> 0.5",
    ]


def test_groups_are_compared_by_role():
    lines = diff_lines(to_dict(load_recipe("gpt2")), to_dict(load_recipe("gpt2-rotary")))
    assert "groups.matrix.lr: 0.0006 -> 0.0018" in lines
    assert any(line.startswith('groups.vector: {"role": "vector"') and line.endswith("-> null") for line in lines)


def test_sums_are_printed_as_formulas_and_other_classes_as_a_whole():
    old = to_dict(load_recipe("tiny"))
    gate = {"kind": "Gate", "reads": [{"source": "x0", "dims": 4}], "role": "skip", "scale": 2.0}
    share = {"kind": "Scalar", "init": -1.5, "role": "skip", "sigmoid": True}
    terms = [
        {"source": "x", "weight": {"kind": "Fixed", "value": 0.5}},
        {"source": "x0", "weight": {"kind": "Product", "factors": [share, gate]}},
    ]
    new = to_dict(load_recipe("tiny", {"model.layers.1.entry": terms, "groups.0.rule": {"kind": "AdamConfig"}}))
    lines = diff_lines(old, new)
    assert "model.layers.1.entry: [] -> 0.5*x + sigmoid(skip[-1.5])*2.0*gate.skip(x0:4)*x0" in lines
    assert any(line.startswith('groups.matrix.rule: {"kind": "MuonConfig"') for line in lines)
    nets = [{"name": "a"}]
    columns = [{"source": "x"}, {"source": "x0", "weight": {"kind": "Column", "net": "a", "init": 0.5, "width": 1}}]
    net = to_dict(load_recipe("tiny", {"model.nets": nets, "model.input_nets": ["a"], "model.output": columns}))
    assert "model.output: x -> x + net.a[0.5]x1*x0" in diff_lines(old, net)


def test_lists_of_objects_of_other_lengths_are_compared_item_by_item():
    two, three = (to_dict(load_recipe("tiny", {"model.num_layers": n})) for n in (2, 3))
    assert [line[:22] for line in diff_lines(two, three)] == ["model.layers.2: null ->"[:22]]


def test_the_class_of_an_item_of_a_tuple_survives():
    product = {"kind": "Product", "factors": [{"kind": "Fixed", "value": 2.0}, {"kind": "Fixed", "value": 3.0}]}
    recipe = load_recipe("tiny", {"model.output": [{"source": "x", "weight": product}]})
    assert from_dict(type(recipe), to_dict(recipe)) == recipe
    assert recipe.hash != load_recipe("tiny").hash
