"""What a model's sums name must be there by then; each error says what is wrong and what would do."""

import pytest

from nanosprint.recipes import load_recipe

A = {"name": "a"}


def column(source="x", net="a", **more):
    return [{"source": "x"}, {"source": source, "weight": {"kind": "Column", "net": net, **more}}]


def gate(*reads):
    return [
        {"source": "x", "weight": {"kind": "Gate", "role": "g", "reads": [{"source": s, "dims": d} for s, d in reads]}}
    ]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model.output": [{"source": "y"}]}, r"model.output.0 reads source 'y' before .*: by then there are x, x0"),
        ({"model.input": [{"source": "x"}]}, "model.input.0 reads source 'x' before anything writes it"),
        ({"model.input": []}, "model.input is an empty sum"),
        ({"model.output": [{"source": "bigram"}]}, "set model.bigram"),
        ({"model.output": [{"source": "table1"}], "model.value_tables": 1}, "model.value_tables=1, and tables count"),
        ({"model.layers.0.mixer.values": [{"source": "table0"}]}, "mixer.values.0 reads source 'table0'"),
        ({"model.layers.0.reads": "a", "model.layers.1.tap": "a"}, "model.layers.0.reads reads source 'a'"),
        ({"model.layers.0.join": [{"source": "a"}], "model.layers.0.tap": "a"}, "model.layers.0.join.0 reads source"),
        ({"model.layers.0.after_mlp": [{"source": "mixer"}]}, "model.layers.0.after_mlp.0 reads source 'mixer'"),
        ({"model.layers.0.entry": [{"source": "n"}]}, "model.layers.0.entry.0 reads source 'n'"),
        ({"model.layers.0.tap_in": "a", "model.layers.1.tap": "a"}, "writes tap 'a', which was already written"),
        ({"model.layers.0.tap": "x0"}, "calls a tap 'x0', the name of another source"),
        ({"model.layers.0.tap": "table7"}, "calls a tap 'table7', the name of another source"),
        ({"model.output": column()}, "model.output.1.weight names gate net 'a', which model.nets does not have"),
        ({"model.nets": [A], "model.output": column()}, "'a', which nothing has evaluated by then"),
        ({"model.nets": [A], "model.output_nets": ["a"], "model.layers.1.entry": column()}, "nothing has evaluated"),
        ({"model.nets": [A], "model.layers.1.nets": ["a"], "model.layers.0.entry": column()}, "nothing has evaluated"),
        ({"model.nets": [A], "model.input_nets": ["a"], "model.output_nets": ["a"]}, "evaluates gate net 'a' a second"),
        ({"model.nets": [A], "model.input_nets": ["a"]}, "no weight takes a column of it: remove it"),
        ({"model.nets": [A, A], "model.input_nets": ["a"], "model.output": column()}, "wants a name of its own"),
        ({"model.nets": [{"name": "a.b"}]}, "wants a name of its own, of letters and digits"),
        (
            {"model.nets": [{**A, "shared_scale": "s"}, {"name": "b", "scale": 1.0, "shared_scale": "s"}]},
            r"model.nets share 's', but start at \[0.1, 1.0\]: use one scale",
        ),
        (
            {"model.nets": [A], "model.input_nets": ["a"], "model.output": column(width=2)},
            "width=2 does not divide",
        ),
        ({"model.layers.0.entry": gate()}, "entry.0.weight.reads is empty"),
        ({"model.layers.0.entry": gate(("x", 33))}, "reads 33 dimensions of model.dim=32"),
        ({"model.layers.0.entry": gate(("e", 4))}, "reads source 'e' before anything writes it"),
        ({"model.output": [{"source": "x", "weight": {"kind": "Product", "factors": []}}]}, "an empty product"),
        ({"model.document_start": 257}, "model.document_start=257 is no token of model.vocab_size=257"),
        ({"model.head_copy": True}, "model.head_copy with model.tied_head=False and model.init.head=zero"),
        ({"model.init.head": "normal"}, "set model.init.head_std"),
        ({"model.bigram": {"rows": 1}}, "model.bigram: rows=1 must be at least 2"),
        ({"model.bigram": {"rows": 9}}, "model.bigram is set, but no sum reads 'bigram'"),
        ({"model.value_tables": 1}, "model.value_tables=1, but no sum reads 'table0'"),
    ],
)
def test_what_cannot_be_had_is_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        load_recipe("tiny", overrides)


def test_what_can_be_had():
    load_recipe(
        "tiny",
        {
            "model.nets": [A],
            "model.layers.0.tap": "first",
            "model.layers.1.nets": ["a"],
            "model.layers.1.reads": "first",
            "model.layers.1.mixer.head_gate": {"kind": "Column", "net": "a", "width": 1},
            "model.layers.1.mixer.values": [*gate(("n", 2), ("first", 32)), {"source": "v"}],
            "model.output": column("first"),
        },
    )
