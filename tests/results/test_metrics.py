"""metrics.jsonl: round trips, torn and damaged lines, resumes."""

import hashlib
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanosprint.results.metrics import (
    TornLine,
    at_target,
    decode_line,
    effective_lines,
    encode_line,
    metrics_sha256,
    read_metrics,
    repair_tail,
    series,
)


def train(step, loss=1.0, **fields):
    return {"kind": "train", "step": step, "tokens": step * 8, "loss": loss, "train_ms": step * 2.0, **fields}


def write(path, *lines, tail=""):
    path.write_text("".join(encode_line(line) + "\n" for line in lines) + tail)
    return path


@pytest.mark.parametrize(("value", "word"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_nonfinite_loss_is_valid_json(value, word):
    text = encode_line(train(3, value, grad_norm=math.inf))

    def refuse(constant):
        raise AssertionError(constant)

    raw = json.loads(text, parse_constant=refuse)
    assert raw["loss"] is None
    assert raw["nonfinite"] == word
    assert raw["grad_norm"] is None
    assert raw["grad_norm_nonfinite"] == "inf"
    back = decode_line(text, "here")
    assert str(back["loss"]) == str(value)
    assert back["grad_norm"] == math.inf
    assert set(back) == {*train(3), "grad_norm"}


@given(
    loss=st.floats(),
    step=st.integers(0, 2**60),
    extra=st.dictionaries(
        st.text(min_size=1).filter(lambda k: "nonfinite" not in k and k not in train(0)),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers()),
    ),
)
def test_round_trip(loss, step, extra):
    line = {**train(0), "loss": loss, "step": step, **extra}
    text = encode_line(line)
    assert "\n" not in text
    assert decode_line(text, "here").keys() == line.keys()
    for key, value in decode_line(text, "here").items():
        assert value == line[key] or (value != value and line[key] != line[key])


def test_encode_refuses_what_is_no_line():
    with pytest.raises(ValueError, match=r"kind='validation'.*train, val, event"):
        encode_line({"kind": "validation"})
    with pytest.raises(TypeError):
        encode_line(train(1, extra=object()))


def test_torn_last_line_is_reported_and_left_out(tmp_path):
    path = write(tmp_path / "m", train(1), train(2), tail='{"kind": "train", "st')
    with pytest.warns(TornLine, match="line 3 is torn after 21 bytes"):
        assert [line["step"] for line in read_metrics(path)] == [1, 2]
    said = []
    assert len(list(read_metrics(path, said.append))) == 2
    assert len(said) == 1


def test_any_cut_is_survived_and_repaired(tmp_path):
    """As a kill -9 in the middle of a write would leave it, at every byte."""
    path = write(tmp_path / "m", train(1), train(2))
    whole = path.read_bytes()
    first = len(encode_line(train(1))) + 1
    for size in range(first, len(whole)):
        path.write_bytes(whole[:size])
        said = []
        assert [line["step"] for line in read_metrics(path, said.append)] == [1]
        assert repair_tail(path) == size - first
        assert len(said) == (size > first)
        with path.open("a") as file:
            file.write(encode_line(train(3)) + "\n")
        assert [line["step"] for line in read_metrics(path)] == [1, 3]


def test_repair_of_missing_empty_whole_and_newline_free_files(tmp_path):
    path = tmp_path / "m"
    assert repair_tail(path) == 0
    assert not path.exists()
    path.touch()
    assert repair_tail(path) == 0
    write(path, train(1))
    before = path.read_bytes()
    assert repair_tail(path) == 0
    assert path.read_bytes() == before
    path.write_bytes(b"x" * 200_000)  # longer than a block of the search
    assert repair_tail(path) == 200_000
    path.write_bytes(before + b"y" * 200_000)
    assert repair_tail(path) == 200_000
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (b'{"kind": "train", "st\n', "line 2, is damaged at line 1, column"),
        (b"[1]\n", "line 2, is damaged: expected a JSON object, found list"),
        (b'{"kind": "noise", "step": 1}\n', "line 2, is damaged: kind='noise'"),
        (b'{"kind": "val", "loss": 1}\n', "line 2, is damaged: step=None"),
        (b"\n", "line 2, is damaged"),
        (b'{"kind": "train\xff"}\n', "line 2, is damaged at byte 15: not UTF-8"),
    ],
)
def test_damage_in_the_middle_is_an_error(tmp_path, damage, message):
    path = write(tmp_path / "m", train(1))
    path.write_bytes(path.read_bytes() + damage + (encode_line(train(2)) + "\n").encode())
    with pytest.raises(ValueError, match=message):
        list(read_metrics(path))


def test_missing_file(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        list(read_metrics(tmp_path / "m"))
    with pytest.raises(ValueError, match="does not exist"):
        metrics_sha256(tmp_path / "m")


def test_checksum_is_that_of_the_bytes(tmp_path):
    path = write(tmp_path / "m", train(1))
    assert metrics_sha256(path) == hashlib.sha256(path.read_bytes()).hexdigest()


def test_last_line_of_a_step_holds():
    lines = [train(1, 5.0), train(2, 4.0), train(2, 3.0), {"kind": "val", "step": 2, "loss": 9.0}]
    assert series(lines, "train", "loss") == {1: 5.0, 2: 3.0}
    assert series(lines, "val", "loss") == {2: 9.0}
    assert series(lines, "train", "lr") == {}


def test_resume_voids_what_came_later():
    """Killed at 5 with a checkpoint at 3, resumed, and stopped again at 4: steps 5's old line never happened."""
    lines = [train(s, 1.0 * s) for s in (1, 2, 3, 4, 5)]
    lines += [{"kind": "val", "step": 5, "loss": 0.5}]
    lines += [{"kind": "event", "name": "resume", "step": 3}, train(4, 40.0)]
    assert series(lines, "train", "loss") == {1: 1.0, 2: 2.0, 3: 3.0, 4: 40.0}
    assert series(lines, "val", "loss") == {}
    assert [line["step"] for line in effective_lines(lines, "train")] == [1, 2, 3, 4]


def test_at_target_at_its_edges():
    lines = [{"loss": 4.0, "t": 10, "e": 1.0}, {"loss": 3.0, "t": 20}, {"loss": 3.5, "t": 30}, {"loss": 2.0, "t": 40}]
    assert at_target(lines, 3.5, "t") == 15
    assert at_target(lines, 3.0, "t") == 20
    assert at_target(lines, 2.9, "t") == pytest.approx(34)
    assert at_target(lines, 4.5, "t") == 10  # below from the first: no earlier point to start a line from
    assert at_target(lines, 1.9, "t") is None
    assert at_target(lines, 3.5, "e") is None  # measured at one end only
