"""`scaling`: time that no computing hides, efficiency, tables, failures; two gloo processes from launch to table."""

import json
import os
import random
import sys

import pytest

from benchmarks import scaling, scaling_table
from benchmarks.overlap import communication, length
from benchmarks.scaling_table import efficiency, tables, write_tables
from nanosprint.training.profile import Span, spans_of
from tests import forked

STAGED = (  # the record, small
    "model.dim=32", "model.num_heads=2", "model.num_layers=3", "model.vocab_size=512", "model.document_start=511",
    "model.seq_len=96", "train.batch_tokens=768", "train.num_steps=90", "eval.batch_tokens=512",
    "precision.compute=fp32", "precision.orthogonalize=fp32", "exec.device=cpu", "exec.compile=off",
    "exec.attention=reference", "exec.threads=1",
)  # fmt: skip


def spans(generator, count):
    """Kernels at whole milliseconds, on any stream: they overlap, touch, repeat and may be empty."""
    names = ["ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "ncclDevKernel_SendRecv", "nvjet_tst_1", "_attend_kernel"]
    starts = [generator.randrange(60) for _ in range(count)]
    return [Span(generator.choice(names), float(s), float(s + generator.randrange(12))) for s in starts]


def covered(spans):
    """The milliseconds in which one of them runs, counted one by one."""
    return {ms for span in spans for ms in range(int(span.start), int(span.end))}


@pytest.mark.parametrize("seed", range(20))
def test_exposed_time_against_counting(seed):
    given = spans(random.Random(seed), 3 + 2 * seed)
    sending = [span for span in given if span.name.startswith("nccl")]
    busy = covered(span for span in given if not span.name.startswith("nccl"))
    assert length(span[1:] for span in given) == len(covered(given))
    found = communication(given, 4)
    if not sending:
        assert found is None
    else:
        assert found == (len(covered(sending)) / 4, len(covered(sending) - busy) / 4)


def test_exposed_time_at_the_edges():
    send, work = "ncclDevKernel_AllGather_RING_LL", "nvjet_tst"
    assert length([]) == 0
    assert communication([Span(work, 0, 5)], 1) is None
    assert communication([Span(send, 0, 5)], 2) == (2.5, 2.5)
    assert communication([Span(send, 0, 5), Span(work, 0, 5)], 1) == (5, 0)
    assert communication([Span(send, 2, 9), Span(send, 1, 4), Span(work, 3, 5), Span(work, 8, 20)], 1) == (8, 5)


class Event:
    def __init__(self, key, start, end, device, **more):
        self.key, self.time_range, self.device_type = key, Range(start, end), device
        self.__dict__.update(more)


class Range:
    def __init__(self, start, end):
        self.start, self.end = start, end


def test_spans_are_kernels_on_the_gpu():
    from torch.autograd import DeviceType

    events = [
        Event("late", 3000, 4000, DeviceType.CUDA),
        Event("kernel", 1000, 1500, DeviceType.CUDA, is_user_annotation=False),
        Event("aten::mm", 0, 9000, DeviceType.CPU),
        Event("nccl:all_reduce", 0, 9000, DeviceType.CUDA),
        Event("ProfilerStep#1", 0, 9000, DeviceType.CUDA),
        Event("mine", 0, 9000, DeviceType.CUDA, is_user_annotation=True),
    ]
    assert spans_of(events) == [Span("kernel", 1.0, 1.5), Span("late", 3.0, 4.0)]


def row(kind="scaling", gpus=1, **more):
    about = {
        "benchmark": kind, "recipe": "record-third", "variant": {"exec.attention": "triton"}, "gpus": gpus,
        "devices": [{"name": "NVIDIA H200", "uuid": "a"}, {"name": "NVIDIA H200", "uuid": "b"}],
        "versions": {"torch": "2.11.0"}, "commit": "0123456789", "dirty": False,
    }  # fmt: skip
    return {**about, **more}


def stage(name, gpus, ms, tokens, steps, **more):
    figures = {"stage": name, "ms": ms, "batch_tokens": tokens, "us_per_token": 1e3 * ms / tokens, "idle": 0.02}
    figures |= {"tokens_per_s": 1e3 * tokens / ms, "memory_gib": 80.0 / gpus, "steps_of_run": steps}
    return row(gpus=gpus, **{**figures, **more})


def training(gpus, train_s, loss, curve, **more):
    figures = {"train_s": train_s, "tokens_per_s": 8e7 / train_s, "startup_s": 74.0, "cold": True, "energy_j": 84000.0}
    figures |= {"warm_start_s": 30.5, "steps": 313, "val_loss": loss, "val_curve": curve, "memory_gib": 79.0}
    return row("training", gpus, **{**figures, "differing": [] if gpus > 1 else None, **more})


def test_efficiency():
    rows = [{"gpus": 1, "stage": "a", "tokens_per_s": 10.0}, {"gpus": 1, "stage": "b", "tokens_per_s": 20.0}]
    four = {"gpus": 4, "stage": "b", "tokens_per_s": 60.0}
    assert efficiency(four, [four, *rows], "stage") == 0.75
    assert efficiency(rows[0], rows, "stage") == 1
    assert efficiency({**four, "stage": "c"}, rows, "stage") is None


@pytest.fixture
def results(tmp_path):
    two = {"communication_ms": [5.0, 4.0], "exposed_ms": [1.25, 0.5], "sent_mb": 720.0, "sent_gb_per_s": 13.1}
    rows = [
        stage("stage 0", 1, 999.0, 100, 3),  # measured again below
        stage("stage 0", 1, 10.0, 100, 3), stage("stage 1", 1, 40.0, 400, 1),
        stage("stage 0", 2, 5.0, 100, 3, **two), stage("stage 1", 2, 25.0, 400, 1, **two),
        stage("stage 0", 4, 2.5, 100, 3),  # its second stage failed
        row("agreement", 1, differing=[]), row("agreement", 2, differing=[]),
        row("agreement", 4, differing=["head.weight"]),
        training(1, 120.0, 3.5685, [[0, 10.8], [100, 4.5], [313, 3.5685]]),
        training(2, 62.5, 3.5701, [[0, 10.8], [100, 4.49], [313, 3.5701]]),
    ]  # fmt: skip
    rows.append({**rows[1], "devices": [{"name": "NVIDIA H200", "uuid": "other host"}], "recipe": "gpt2"})
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "a.metrics.jsonl").write_text('{"kind": "val", "step": 0, "loss": 10.8}\n')
    return tmp_path


def cells(text, start):
    return [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if line.startswith(start)]


def test_tables_from_rows(results):
    text = tables(results)
    ours, other = text.split("**`gpt2 exec.attention=triton`**")
    assert "**`record-third exec.attention=triton`**" in ours
    assert [(c[1], c[3], c[6]) for c in cells(ours, "| stage 0")] == [
        ("1", "10.00", "100.0%"), ("2", "5.00", "100.0%"), ("4", "2.50", "100.0%")
    ]  # fmt: skip
    one, two = cells(ours, "| stage 1")
    assert one[6:] == ["100.0%", "-", "-", "2.0%", "80.0", "-", "-", "-"]
    assert two[6:] == ["80.0%", "4.00 to 5.00", "0.50 to 1.25", "2.0%", "40.0", "720.0", "180", "13.1"]
    # 3 steps of 100 tokens and one of 400: 70 ms on one GPU, 40 on two; four GPUs lack a stage
    whole = cells(ours, "| whole run")
    assert [c[1:4] + c[6:7] for c in whole] == [["1", "175", "17.50", "100.0%"], ["2", "175", "10.00", "87.5%"]]
    assert cells(ours, "| 2 ")[0] == [
        "2", "62.50", "1,280,000", "96.0%", "74.0", "30.5", "84,000", "313", "3.5701", "+0.0016", "0.0100", "79.0"
    ]  # fmt: skip
    assert "After the steps measured on 2 GPUs all parameters are the same bits on every rank." in ours
    assert "on 4 GPUs 1 parameters **differ** between ranks: head.weight." in ours
    assert "At the end of training on 2 GPUs all parameters are the same bits" in ours
    assert "on 1 GPUs" not in ours
    assert "A host with 2 x NVIDIA H200; torch 2.11.0; commit 0123456." in ours
    assert cells(other, "| stage 0")[0][6] == "100.0%"
    assert "whole run" not in other
    assert "A host with 1 x" in other


def test_which_steps_were_recorded(tmp_path):
    rows = [
        stage("stage 0", 1, 10.0, 100, 3, recorded=True, recording_failure=None),
        stage("stage 0", 2, 5.0, 100, 3, recorded=True, recording_failure=None),
        stage("stage 1", 2, 9.0, 200, 3, recorded=False, recording_failure="process 1: RuntimeError: busy"),
        stage("stage 0", 4, 5.0, 100, 3),  # by an earlier version, which did not say
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    text = tables(tmp_path)
    assert "Steps were recorded: stage 0 on 1, stage 0 on 2." in text
    assert "Steps were not recorded (process 1: RuntimeError: busy): stage 1 on 2." in text
    assert "on 4" not in text


def test_the_doc_in_the_repository_has_its_marks(tmp_path, results):
    copy = tmp_path / "scaling.md"
    copy.write_text(scaling.DOC.read_text())
    write_tables(tmp_path / "nothing here", copy)
    assert scaling_table.NOTHING in copy.read_text()
    write_tables(results, copy)
    assert "| whole run | 2 |" in copy.read_text()
    assert scaling_table.NOTHING not in copy.read_text()
    copy.write_text("no marks")
    with pytest.raises(ValueError, match="<!-- measured -->"):
        write_tables(results, copy)


def launch(command, limit_s, more):
    """`scaling.run` with processes that a server forks, in place of fresh interpreters and of torchrun's."""
    assert command[:2] == [sys.executable, "-m"]
    processes, words = 1, command[2:]
    if words[0] == "torch.distributed.run":
        processes = int(words[words.index("--nproc-per-node") + 1])
        words = words[words.index("-m") + 1 :]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **more}
    done = forked.run(*words, cwd=scaling.ROOT, environment=environment, timeout=limit_s, processes=processes)
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    return f"ended with code {done.returncode}" if done.returncode else None


@pytest.fixture
def bench(monkeypatch):
    """bench(*words): `python -m benchmarks.scaling`; the exit code, or what it says at its end."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["scaling", *map(str, words)])
        try:
            scaling.main()
        except SystemExit as ended:
            return ended.code
        return 0

    return call


def test_two_processes_measure_every_stage_and_a_failure_costs_no_other(tmp_path, bench, monkeypatch, capfd):
    """Two are started by torchrun itself, the others as if by it."""
    real = scaling.run

    def run(command, *more):
        return (real if "--nproc-per-node 2" in " ".join(command) else launch)(command, *more)

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(scaling, "run", run)
    ended = bench("record", *STAGED, "--gpus", "3,1,2", "--steps", 1, "--profile", 2, "--out", tmp_path / "out")
    assert ended == "steps on 3: ended with code 1"
    done = capfd.readouterr()
    assert "3 processes cannot share train.lanes=8 equally" in done.err
    rows = [json.loads(line) for line in (tmp_path / "out" / "record.jsonl").read_text().splitlines()]
    steps = [r for r in rows if r["benchmark"] == "scaling"]
    assert [(r["gpus"], r["stage"]) for r in steps] == [(n, f"stage {i}") for n in (1, 2) for i in range(3)]
    for one, two in zip(steps[:3], steps[3:], strict=True):
        assert one["batch_tokens"] == two["batch_tokens"]
        assert "sent_mb" not in one
        assert two["sent_gb_per_s"] == pytest.approx(two["sent_mb"] / two["ms"])
        assert two["communication_ms"] == two["exposed_ms"] == [None, None]  # a CPU has no such kernels
    assert steps[5]["sent_mb"] > steps[4]["sent_mb"] > 0.1  # the embedding has left the head, and travels itself
    assert [(r["gpus"], r["differing"]) for r in rows if r["benchmark"] == "agreement"] == [(1, []), (2, [])]
    assert "| whole run | 2 |" in done.out


def test_whole_trainings_beside_an_earlier_one(tmp_path, tiny_data, bench, monkeypatch, capsys):
    monkeypatch.setattr(scaling, "run", launch)
    out, common = tmp_path / "out", ("tiny", "exec.device=cpu", "exec.threads=1", "--gpus", "none")
    common += ("--data", tiny_data, "--runs", tmp_path / "runs", "--out")
    assert bench(*common, tmp_path / "first", "--train", "1") == 0
    earlier = tmp_path / "first" / "tiny-1337-1gpu.record.json"
    assert bench(*common, out, "--train", "2", "--cold", "--one-gpu", earlier) == 0
    one, without_warm, two = [json.loads(line) for line in (out / "tiny.jsonl").read_text().splitlines()]
    assert (one["gpus"], one["cold"], one["differing"], one["warm_start_s"]) == (1, None, None, None)
    assert (two["gpus"], two["cold"], two["differing"]) == (2, True, [])
    assert two["warm_start_s"] > 0
    assert without_warm == {**two, "warm_start_s": None}  # written at once, should the second start be cut off
    assert [step for step, _ in one["val_curve"]] == [step for step, _ in two["val_curve"]]
    assert two["val_loss"] == pytest.approx(one["val_loss"], abs=1e-3)
    assert two["val_curve"][-1] == [20, two["val_loss"]]
    assert "At the end of training on 2 GPUs all parameters are the same bits on every rank." in capsys.readouterr().out
    assert (out / "tiny-1337-2gpu.record.json").exists()
    assert len(list((tmp_path / "runs").iterdir())) == 2  # the warm start's is gone


def test_a_launch_that_takes_too_long_is_ended():
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert scaling.run(sleep, 0.5, {}) == "took more than 0.5 s"
    assert scaling.run([sys.executable, "-c", "raise SystemExit(3)"], 60, {}) == "ended with code 3"


def test_multicast_stays_off_in_what_is_launched(monkeypatch):
    for name in scaling.NO_MULTICAST:
        monkeypatch.delenv(name, raising=False)
    check = "import os, sys; sys.exit([os.environ[n] for n in sys.argv[1:]] != ['0', '1', '1'])"
    assert scaling.run([sys.executable, "-c", check, *scaling.NO_MULTICAST], 60, {}) is None


def test_what_cannot_be_measured_is_refused(tmp_path, bench, capsys):
    assert bench("record", "train.num_stepz=3", "--out", tmp_path / "out") == 2
    assert "num_stepz" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
