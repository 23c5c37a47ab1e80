"""Generation against a model that is read anew for every token."""

import pytest
import torch

from nanosprint.generate import draw, generate
from nanosprint.model.gpt import GPT
from nanosprint.recipes import load_recipe


def model_of(*overrides):
    model = GPT(load_recipe("tiny", overrides).model)
    model.init_weights(0)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.3, generator=torch.Generator().manual_seed(p.numel()))
    return model


NO_CACHE = 'model.bigram={"rows": 50}', 'model.output=[{"source": "x"}, {"source": "bigram"}]'


@pytest.mark.parametrize("overrides", [(), ('model.ngrams={"orders": [2, 3]}',), NO_CACHE])
def test_greedy_is_the_argmax_of_the_whole_forward_pass(overrides):
    model = model_of(*overrides)
    history = model.config.history
    ids = [0] * history + [5, 9, 200]
    expected = []
    for _ in range(20):
        expected.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        ids.append(expected[-1])
    assert list(generate(model, [5, 9, 200], 20, vocab_size=257, temperature=0)) == expected


@pytest.mark.parametrize("overrides", [(), ('model.ngrams={"orders": [2, 3]}',), NO_CACHE])
def test_a_full_context_drops_its_older_half(overrides):
    model = model_of(*overrides)
    history, context = model.config.history, 32
    ids, start, expected = [0] * history + [1, 2], history, []
    for _ in range(70):
        expected.append(int(model(torch.tensor([ids[start - history :]]))[0, -1].argmax()))
        ids.append(expected[-1])
        if len(ids) - 1 - start == context:  # the window was full when the last token was read
            start = len(ids) - context // 2
    assert list(generate(model, [1, 2], 70, vocab_size=257, temperature=0)) == expected


def test_without_a_cache_it_says_so_once(caplog):
    caplog.set_level("INFO", "nanosprint")
    list(generate(model_of(*NO_CACHE), [1], 3, vocab_size=257))
    assert [record.getMessage() for record in caplog.records].count(
        "the model's techniques look across tokens: the whole context is read anew for every token"
    ) == 1


def test_a_long_prompt_is_cut_to_the_context():
    model = model_of()
    prompt = list(range(100))
    cut = list(generate(model, prompt[-32:], 3, vocab_size=257, temperature=0))
    assert list(generate(model, prompt, 3, vocab_size=257, temperature=0)) == cut


def test_ids_the_tokenizer_does_not_know_are_never_drawn():
    model = model_of()
    with torch.no_grad():
        model.head.weight[100:] *= 100
    assert max(generate(model, [1], 200, vocab_size=100, temperature=5.0)) < 100


def test_draw_follows_the_distribution():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(4)
    for _ in range(4000):
        counts[draw(logits, 0.5, None, generator)] += 1
    torch.testing.assert_close(counts / 4000, (logits / 0.5).softmax(-1), atol=0.03, rtol=0)
    assert {draw(logits, 1.0, 2, generator) for _ in range(200)} == {1, 2}
    assert draw(logits, 0, None, generator) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": []}, "the prompt is empty"),
        ({"num_tokens": 0}, "--tokens 0"),
        ({"temperature": -1}, "--temperature -1"),
        ({"top_k": 0}, "--top-k 0"),
        ({"prompt": [300]}, "token 300 is outside the vocabulary of 257"),
    ],
)
def test_bad_input(options, message):
    arguments = {"prompt": [1], "num_tokens": 3, "vocab_size": 257, **options}
    prompt, num_tokens = arguments.pop("prompt"), arguments.pop("num_tokens")
    with pytest.raises(ValueError, match=message):
        list(generate(model_of(), prompt, num_tokens, **arguments))
