"""Text from the model of a run: `nanosprint sample`."""

from collections.abc import Iterator
from pathlib import Path

import torch

from nanosprint.data.tokenizers import load_tokenizer, stream_text
from nanosprint.errors import UserError
from nanosprint.generate import generate
from nanosprint.model.gpt import GPT
from nanosprint.results.runs import RunDir
from nanosprint.training import checkpoint
from nanosprint.training.batch import ModelStage, context_of
from nanosprint.training.distributed import pick_device
from nanosprint.training.request import RunRequest, load_request


def load_model(run: str | Path, device: str = "cpu") -> tuple[GPT, RunRequest]:
    """The model of the newest checkpoint in a run directory, in fp32, with the request that made it.

    Raises UserError where there is no checkpoint.
    """
    run_dir = RunDir(Path(run)).require()
    request = load_request(run_dir)
    saved = checkpoint.load_latest(run_dir.checkpoints_path)
    if saved is None:
        raise UserError(f"{run} has no checkpoint yet: train it with `nanosprint resume {run}`")
    model = GPT(request.recipe.model)
    found = model.load_state_dict(saved["model"], strict=False)
    assert not found.missing_keys, found.missing_keys
    assert all("fp8" in key for key in found.unexpected_keys), found.unexpected_keys  # only training has that state
    return model.to(device=pick_device(device), dtype=torch.float32).eval(), request


def continue_text(
    run: str | Path,
    *,
    prompt: str | None,
    num_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> Iterator[str]:
    """Yield the prompt and then its continuation, piece by piece, as text that is whole UTF-8.

    Without a prompt, the text begins a document, or a line where the tokenizer knows no documents. Raises ValueError
    for a prompt with characters that the tokenizer does not have.
    """
    model, request = load_model(run, device)
    tokenizer = load_tokenizer(Path(run), request.recipe.data.tokenizer)  # training put it beside the checkpoints
    if prompt is None:
        ids = [tokenizer.bos] if tokenizer.bos is not None else tokenizer.encode("\n").tolist()
    else:
        ids = tokenizer.encode(prompt).tolist()
        if tokenizer.bos is not None:
            ids = [tokenizer.bos, *ids]
        yield prompt
    recipe = request.recipe
    plan = recipe.eval_plan(recipe.train.num_steps)
    tokens = generate(
        model,
        ids,
        num_tokens,
        vocab_size=min(tokenizer.vocab_size, model.config.vocab_size),
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        context=context_of(None, plan, ModelStage(model).enter(plan)),
    )
    yield from stream_text(tokenizer, tokens)
