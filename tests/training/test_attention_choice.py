"""What a recipe asks of attention, who decides on the back end, and where that is written down."""

import logging
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import nanosprint
from nanosprint import load_recipe
from nanosprint.config.recipe import Execution
from nanosprint.config.schedule import WindowSchedule
from nanosprint.ops.attention import needs_of
from nanosprint.results.runs import RunDir
from nanosprint.training import attention_choice
from nanosprint.training.attention_choice import attention_calls, choose_attention
from nanosprint.training.batch import random_input
from nanosprint.training.distributed import World
from nanosprint.training.request import RunRequest, resumed
from nanosprint.training.resolve import resolve
from tests.optim.toy import join, spawn

CPU = torch.device("cpu")
SETTLED = Execution(device="cpu", compute="fp32", tokens_per_microbatch=196_608, parts_per_microbatch=1)


def asked(name, execution=SETTLED, **changes):
    calls = attention_calls(replace(load_recipe(name), **changes), execution)
    return {(call.window, call.places): call.count for call in calls}, calls


def test_the_record_asks_for_paired_and_plain_heads_at_its_narrowest_and_widest():
    counts, calls = asked("record")
    # Ten layers attend: four of pairs and four plain ones within the short window, two within the long one.
    assert counts == {(128, 2): 4, (128, 1): 4, (384, 1): 2, (768, 2): 4, (768, 1): 4, (1664, 1): 2}
    assert {(call.rows, call.seq_len, call.num_heads, call.head_dim) for call in calls} == {(4, 49_152, 6, 128)}
    assert {call.shape for call in calls if call.places == 2} == {(4, 98_304, 3, 128)}
    assert needs_of(calls, CPU, torch.bfloat16).documents


def test_documents_are_those_of_the_warm_up():
    recipe, execution = load_recipe("record-third"), replace(SETTLED, tokens_per_microbatch=49_152)
    call = attention_calls(recipe, execution)[1]
    plan = next(plan for plan in map(recipe.plan, range(10_000)) if plan.batch_tokens == recipe.max_batch_tokens)
    documents = random_input(recipe, plan, call.rows, CPU).context.documents
    assert call.places == 1
    assert torch.equal(call.documents(CPU).cu_seqlens, documents.cu_seqlens)
    assert documents.max_seq_len <= call.longest == 2048


def test_a_part_has_a_part_of_the_rows():
    _, whole = asked("gpt2")
    _, half = asked("gpt2", replace(SETTLED, parts_per_microbatch=2))
    assert (whole[0].rows, half[0].rows) == (128, 64)


def test_windows_that_no_layer_has_are_not_asked_for():
    recipe = load_recipe("gpt2")
    schedule = replace(recipe.schedule, windows=WindowSchedule(start=64, end=512))
    counts, calls = asked("gpt2", schedule=schedule)
    assert counts == {(None, 1): 24}  # 12 layers at both ends of a growth that they do not see
    assert not needs_of(calls, CPU, torch.bfloat16).window


@pytest.mark.parametrize(
    ("seq_len", "paired", "name"), [(256, False, "batched"), (256, True, "sdpa"), (128, True, "batched")]
)
def test_on_a_cpu_short_rows_are_counted_in_positions(seq_len, paired, name):
    rows = {"model.seq_len": seq_len, "eval.seq_len": seq_len, "train.batch_tokens": 4096}
    recipe = load_recipe("tiny", {**rows, "model.rotary.pairs": "neighbours"})
    layers = tuple(replace(layer, mixer=replace(layer.mixer, paired=paired)) for layer in recipe.model.layers)
    recipe = replace(recipe, model=replace(recipe.model, layers=layers)).validate()
    assert choose_attention(SETTLED, recipe, World(0, 1, CPU)) == name


def test_float64_takes_what_serves_it():
    record = replace(SETTLED, compute="fp64")
    assert choose_attention(record, load_recipe("record"), World(0, 1, CPU)) == "sdpa"
    assert choose_attention(record, load_recipe("record"), World(0, 1, torch.device("cuda"))) == "sdpa"


def test_an_explicit_name_stays_or_is_refused():
    recipe, world = load_recipe("record"), World(0, 1, CPU)
    assert choose_attention(replace(SETTLED, attention="reference"), recipe, world) == "reference"
    with pytest.raises(ValueError, match=r"exec.attention=batched cannot serve here: it has no documents: use sdpa"):
        choose_attention(replace(SETTLED, attention="batched"), recipe, world)


def test_a_resumed_run_keeps_its_back_end(monkeypatch):
    recipe, world = load_recipe("tiny"), World(0, 1, CPU)
    first = resolve(Execution(device="cpu"), recipe, world)
    monkeypatch.setattr(attention_choice, "choose", lambda *_, **__: pytest.fail("chosen again"))
    request = RunRequest(recipe=recipe, execution=replace(first, attention="reference"))
    again = resolve(resumed(request, request.execution).execution, recipe, world)
    assert again.attention == "reference"


def agree(rank, processes):
    join(rank, processes)

    def choose(device, dtype, calls, cache):
        assert rank == 0, "only one may measure"
        return "reference"

    attention_choice.choose = choose
    execution = resolve(Execution(device="cpu", gpus=2), load_recipe("record-third"), World(rank, 2, CPU))
    assert execution.attention == "reference"
    dist.destroy_process_group()


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo")
def test_processes_take_the_answer_of_the_first():
    spawn(2, agree)


def test_the_log_of_the_run_has_the_outcome(tmp_path, tiny_data, monkeypatch):
    def choose(device, dtype, calls, cache):
        logging.getLogger("nanosprint.ops.attention_backends.select").info("attention sdpa: %.2f ms", 0.5)
        return "sdpa"

    monkeypatch.setattr(attention_choice, "choose", choose)
    monkeypatch.setattr(attention_choice, "_SHORT_ROW", 0)
    monkeypatch.chdir(tmp_path)
    execution = {"device": "cpu", "compile": "off"}
    nanosprint.train(load_recipe("tiny", {"train.num_steps": 2}), data=tiny_data, out="run", execution=execution)
    lines = [line for line in RunDir(tmp_path / "run").read_metrics() if line.get("name") == "attention"]
    assert [line["message"] for line in lines] == ["attention sdpa: 0.50 ms"]
    logger = logging.getLogger(attention_choice.ATTENTION_LOGGER)
    assert (logger.handlers, logger.level) == ([], logging.NOTSET)
