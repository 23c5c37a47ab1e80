"""Several runs of one process, which share what was compiled, against each in a process's own state."""

import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch

from nanosprint.config import Execution
from nanosprint.errors import DivergedError
from nanosprint.recipes import load_recipe
from nanosprint.results.runs import RunDir
from nanosprint.training import setup
from nanosprint.training.api import carry_out, carry_out_in_turn, train
from nanosprint.training.request import RunRequest, start_run
from nanosprint.training.reuse import Kept, release_memory
from tests.recipes.test_ladder import small


def requests(recipes, seeds, data, **execution):
    execution = Execution(device="cpu", **execution)
    return [
        RunRequest(recipe=recipe, execution=execution, seed=seed, data=str(data))
        for recipe, seed in zip(recipes, seeds, strict=True)
    ]


def in_turn(wanted, folder):
    dirs = [start_run(request, folder / f"turn-{i}") for i, request in enumerate(wanted)]
    return list(carry_out_in_turn(wanted, dirs)), dirs


@pytest.mark.parametrize("name", ["tiny", "record"])
def test_each_is_what_it_would_be_alone(name, tmp_path, tiny_data, weights):
    """Another seed, then other rates and a shorter schedule; the record has buffers, a tie that ends, bf16 weights."""
    recipe = load_recipe(name, small(name, **{"train.num_steps": 9}) if name == "record" else {"train.num_steps": 9})
    other = replace(
        recipe,
        train=replace(recipe.train, num_steps=7),
        groups=tuple(replace(group, lr=group.lr / 2) for group in recipe.groups),
    )
    wanted = requests([recipe, recipe, other], [1, 2, 1], tiny_data)
    records, dirs = in_turn(wanted, tmp_path)
    assert [record.steps for record in records] == [9, 9, 7]
    assert len({record.val_loss for record in records}) == 3
    assert [record.shared_graphs for record in records] == [False, True, True]
    for i, request in enumerate(wanted):
        alone = train(
            request.recipe, out=tmp_path / f"alone-{i}", data=tiny_data, seed=request.seed, execution={"device": "cpu"}
        )
        assert alone.val_loss == records[i].val_loss
        one, two = weights(tmp_path / f"alone-{i}"), weights(dirs[i].path)
        assert all(torch.equal(one[key], two[key]) for key in one)


def test_the_second_run_compiles_nothing(tmp_path, tiny_data, monkeypatch):
    made = []

    def count(graph_module, inputs):
        made.append(graph_module)
        return graph_module

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=count))
    recipe = load_recipe("tiny", {"train.num_steps": 4})
    wanted = requests([recipe, recipe], [1, 2], tiny_data, compile="default")
    dirs = [start_run(request, tmp_path / str(i)) for i, request in enumerate(wanted)]
    counts = [(len(made), record.status) for record in carry_out_in_turn(wanted, dirs)]
    assert counts[0][0] > 0
    assert counts[1] == counts[0] == (counts[0][0], "finished")


def test_another_model_gets_its_own_graphs(tmp_path, tiny_data):
    sizes = [{}, {"model.num_layers": 1}]
    records, _ = in_turn(requests([load_recipe("tiny", s) for s in sizes], [1, 1], tiny_data), tmp_path)
    assert [(record.status, record.shared_graphs) for record in records] == [("finished", False)] * 2


def test_seeds_repeat_what_was_chosen_once(tmp_path, tiny_data, monkeypatch):
    """The choices for this machine are those of the first; another batch or another wish has them made anew."""
    asked = []
    real = setup.resolve
    monkeypatch.setattr(setup, "resolve", lambda *words: asked.append(words) or real(*words))
    recipe, wider = (load_recipe("tiny", {"train.num_steps": 2, "train.batch_tokens": n}) for n in (512, 1024))
    first = requests([recipe, recipe, wider], [1, 2, 3], tiny_data)
    other = requests([wider], [4], tiny_data, tokens_per_microbatch=512)
    records, _ = in_turn([*first, *other], tmp_path)
    assert len(asked) == 3
    assert [record.execution["tokens_per_microbatch"] for record in records] == [512, 512, 1024, 512]
    assert [record.shared_graphs for record in records] == [False, True, True, True]


def test_what_is_kept_holds_no_weights_and_only_the_last_model(tmp_path, tiny_data, monkeypatch):
    models, kept = [], Kept()
    real = setup.build_state

    def build(*words):
        state = real(*words)
        models.append(weakref.ref(state.model))
        return state

    monkeypatch.setattr(setup, "build_state", build)
    for i, layers in enumerate((2, 2, 1)):
        recipe = load_recipe("tiny", {"train.num_steps": 2, "model.num_layers": layers})
        (request,) = requests([recipe], [i], tiny_data)
        carry_out(request, start_run(request, tmp_path / str(i)), kept=kept)
        release_memory()
        alive = [model() for model in models if model() is not None]
        assert len(alive) == 1
        assert sum(parameter.numel() for parameter in alive[0].parameters()) == 0
        del alive


def test_after_a_divergence_the_graphs_serve_again(tmp_path, tiny_data):
    kept, steps = Kept(), {"train.num_steps": 6}
    wild = load_recipe("tiny", {**steps, "groups.0.lr": 1e38, "groups.1.lr": 1e38})
    broken, sound = requests([wild, load_recipe("tiny", steps)], [1, 1], tiny_data)
    with pytest.raises(DivergedError):
        carry_out(broken, start_run(broken, tmp_path / "wild"), kept=kept)
    record = carry_out(sound, start_run(sound, tmp_path / "after"), kept=kept)
    alone = train(sound.recipe, out=tmp_path / "alone", data=tiny_data, seed=1, execution={"device": "cpu"})
    assert record.shared_graphs
    assert record.val_loss == alone.val_loss


def test_a_launcher_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="several runs in one process"):
        next(carry_out_in_turn([RunRequest(recipe=load_recipe("tiny"))], [RunDir(tmp_path)]))
