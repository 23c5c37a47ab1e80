"""Techniques that can be taken out of a recipe, one at a time: what an ablation is made of.

A switch is a name and a function from a recipe to the same without the technique. It says why where there is nothing
to take out. What stands in the technique's place is the plain thing of the ladder's foot: GELU for squared ReLU, AdamW
for Muon, no position at all for rotary. Nothing else is tuned again, so that an effect is what the technique is worth
in a recipe that was tuned with it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

from nanosprint.config import (
    AdamConfig,
    AttnSpec,
    Column,
    Fixed,
    LayerSpec,
    LossWeights,
    MuonConfig,
    ParamGroup,
    Product,
    Recipe,
    RotarySpec,
    Scalar,
    Stage,
    Term,
    Windows,
)
from nanosprint.config.edit import unknown_key
from nanosprint.errors import UserError

ADAM = AdamConfig(betas=(0.9, 0.95), eps=1e-8)
ADAM_LR, ADAM_DECAY = 1.8e-3, 0.1  # of recipe gpt2-rotary, the last rung before Muon
SUMS = ("join", "entry", "after_mixer", "after_mlp")


@dataclass(frozen=True)
class Switch:
    """`remove` gives the recipe without the technique; where there is none it returns an equal one."""

    name: str
    summary: str  # what is taken out, and what stands in its place
    remove: Callable[[Recipe], Recipe]


SWITCHES: dict[str, Switch] = {}


def switch(name: str, summary: str) -> Callable[[Callable[[Recipe], Recipe]], Callable[[Recipe], Recipe]]:
    """Register a function as the switch `name`."""

    def register(remove: Callable[[Recipe], Recipe]) -> Callable[[Recipe], Recipe]:
        assert name not in SWITCHES, f"switch {name!r} is registered twice"
        SWITCHES[name] = Switch(name, summary, remove)
        return remove

    return register


def without(recipe: Recipe, name: str) -> Recipe:
    """`recipe` with one technique taken out, and whatever nothing reads any more. Validated.

    Raises ValueError for an unknown switch, and where the recipe has no such technique or cannot do without.
    """
    if name not in SWITCHES:
        error = unknown_key(name, list(SWITCHES))
        raise UserError(str(error).replace("key", "switch", 1) + f" (known: {', '.join(SWITCHES)})")
    return checked(recipe, name, lambda: _tidy(SWITCHES[name].remove(recipe)))


def checked(recipe: Recipe, name: str, make: Callable[[], Recipe]) -> Recipe:
    """What `make` makes of `recipe`, validated. Raises ValueError where that cannot work or is no other recipe."""
    try:
        made = make().validate()
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"switch {name!r} makes no sense in recipe {recipe.name!r}: {error}") from None
    if made == recipe:
        raise UserError(f"switch {name!r} changes nothing in recipe {recipe.name!r}: it has no such technique")
    return made


def one_out(recipe: Recipe) -> tuple[dict[str, Recipe], dict[str, str]]:
    """The recipe without each of its techniques by name, and for the other switches why they make no sense."""
    variants: dict[str, Recipe] = {}
    left_out: dict[str, str] = {}
    for name in SWITCHES:
        try:
            variants[name] = without(recipe, name)
        except UserError as error:
            left_out[name] = str(error)
    return variants, left_out


# --- tools ----------------------------------------------------------------------------------------------------------


def _model(recipe: Recipe, **changes: Any) -> Recipe:
    return replace(recipe, model=replace(recipe.model, **changes))


def _layers(recipe: Recipe, change: Callable[[LayerSpec], LayerSpec]) -> Recipe:
    return _model(recipe, layers=tuple(change(layer) for layer in recipe.model.layers))


def _mixers(recipe: Recipe, change: Callable[[AttnSpec], AttnSpec]) -> Recipe:
    """Every layer's attention changed."""
    return _layers(recipe, lambda l: l if l.mixer is None else replace(l, mixer=change(l.mixer)))


def _precision(recipe: Recipe, **changes: Any) -> Recipe:
    return replace(recipe, precision=replace(recipe.precision, **changes))


def _groups(recipe: Recipe, change: Callable[[ParamGroup], ParamGroup]) -> Recipe:
    return replace(recipe, groups=tuple(change(group) for group in recipe.groups))


def _rules(recipe: Recipe, **changes: Any) -> Recipe:
    """Every Muon group's rule changed."""
    return _groups(
        recipe, lambda g: replace(g, rule=replace(g.rule, **changes)) if isinstance(g.rule, MuonConfig) else g
    )


def _stages(recipe: Recipe, change: Callable[[Stage], Stage]) -> Recipe:
    """Every stage changed, the extension among them."""
    stages = recipe.schedule.stages
    if stages is None:
        return recipe
    changed = replace(
        stages, stages=tuple(change(stage) for stage in stages.stages), extension=change(stages.extension)
    )
    return replace(recipe, schedule=replace(recipe.schedule, stages=changed))


def _losses(recipe: Recipe, change: Callable[[LossWeights], LossWeights]) -> Recipe:
    return _stages(
        recipe,
        lambda s: replace(s, loss=change(s.loss), loss_end=None if s.loss_end is None else change(s.loss_end)),
    )


def _drop(recipe: Recipe, gone: Callable[[str], bool]) -> Recipe:
    """Without the terms of these sums of layers whose source is gone. A sum left with the bare stream is no sum."""

    def kept(terms: tuple[Term, ...]) -> tuple[Term, ...]:
        return tuple(term for term in terms if not gone(term.source))

    def change(layer: LayerSpec) -> LayerSpec:
        fewer: dict[str, Any] = {name: kept(getattr(layer, name)) for name in SUMS}
        changed = replace(layer, **fewer)
        idle: dict[str, Any] = {name: () for name in ("join", "entry") if getattr(changed, name) == (Term(source="x"),)}
        return replace(changed, **idle)

    return _layers(recipe, change)


def _drop_everywhere(recipe: Recipe, gone: Callable[[str], bool]) -> Recipe:
    """Also from the model's input and output and from the values of attention."""

    def kept(terms: tuple[Term, ...]) -> tuple[Term, ...]:
        return tuple(term for term in terms if not gone(term.source))

    recipe = _mixers(_drop(recipe, gone), lambda m: replace(m, values=kept(m.values)))
    return _model(recipe, input=kept(recipe.model.input), output=kept(recipe.model.output))


def _taps(recipe: Recipe) -> set[str]:
    """Names that layers give to streams."""
    return {tap for layer in recipe.model.layers for tap in (layer.tap, layer.tap_in) if tap is not None}


def _tidy(recipe: Recipe) -> Recipe:
    """Without taps that nothing reads, and without gate nets of which no weight takes a column."""
    model = recipe.model
    read = {*_held(model, "source"), *_held(model, "reads")}
    nets = set(_held(model, "net"))

    def needed(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in names if name in nets)

    layers = tuple(
        replace(
            layer,
            tap=layer.tap if layer.tap in read else None,
            tap_in=layer.tap_in if layer.tap_in in read else None,
            nets=needed(layer.nets),
        )
        for layer in model.layers
    )
    return _model(
        recipe,
        layers=layers,
        nets=tuple(net for net in model.nets if net.name in nets),
        input_nets=needed(model.input_nets),
        output_nets=needed(model.output_nets),
    )


def _held(value: Any, name: str) -> Iterator[str]:
    """Every text that stands in a field of that name, anywhere in a tree of specs."""
    if isinstance(value, tuple):
        for item in value:
            yield from _held(item, name)
    elif is_dataclass(value):
        for field, item in vars(value).items():
            if field == name and isinstance(item, str):
                yield item
            yield from _held(item, name)


def _mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """A tree of specs with every object of a class changed."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_mapped(item, kind, change) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{name: _mapped(getattr(value, name), kind, change) for name in vars(value)})
    return value


# --- attention ------------------------------------------------------------------------------------------------------


@switch("rotary", "rotary positions; none in their place")
def _(recipe: Recipe) -> Recipe:
    if recipe.model.positions != "rotary":
        return recipe
    return _model(recipe, positions="none", rotary=RotarySpec())


@switch("half_rotary", "frequencies that stand still; all rotate")
def _(recipe: Recipe) -> Recipe:
    return _model(recipe, rotary=replace(recipe.model.rotary, fraction=1.0))


@switch("yarn", "rotary's extension when windows grow")
def _(recipe: Recipe) -> Recipe:
    return _model(recipe, rotary=replace(recipe.model.rotary, yarn=False))


@switch("qk_norm", "the norm of queries and keys; scores are divided by the root of the head's size")
def _(recipe: Recipe) -> Recipe:
    return _model(recipe, qk_norm=False, attn_scale=None) if recipe.model.qk_norm else recipe


@switch("attn_scale", "the fixed scale of scores; the root of the head's size")
def _(recipe: Recipe) -> Recipe:
    return _model(recipe, attn_scale=None)


@switch("value_residual", "the first layer's values in later ones")
def _(recipe: Recipe) -> Recipe:
    return _mixers(recipe, lambda m: replace(m, value_residual=False))


@switch("value_tables", "tables of values by token")
def _(recipe: Recipe) -> Recipe:
    if not recipe.model.value_tables:
        return recipe
    return _model(_drop_everywhere(recipe, lambda source: source.startswith("table")), value_tables=0)


@switch("windows", "sliding windows; every layer sees everything before")
def _(recipe: Recipe) -> Recipe:
    recipe = _mixers(recipe, lambda m: replace(m, window="full"))
    recipe = _model(recipe, rotary=replace(recipe.model.rotary, yarn=False))
    return replace(recipe, schedule=replace(recipe.schedule, windows=None))


@switch("short_windows", "short windows; every layer's is long")
def _(recipe: Recipe) -> Recipe:
    return _mixers(recipe, lambda m: replace(m, window="long") if m.window == "short" else m)


@switch("growing_windows", "the growth of windows with training; they are the last ones from the start")
def _(recipe: Recipe) -> Recipe:
    schedule = recipe.schedule
    if schedule.windows is not None:
        return replace(
            recipe, schedule=replace(schedule, windows=replace(schedule.windows, start=schedule.windows.end))
        )
    if schedule.stages is None:
        return recipe
    last: Windows = schedule.stages.stages[-1].windows
    return _stages(recipe, lambda s: replace(s, windows=last))


@switch("eval_windows", "wider windows in the last validation; those of training")
def _(recipe: Recipe) -> Recipe:
    stages = recipe.schedule.stages
    if stages is None:
        return recipe
    return replace(recipe, schedule=replace(recipe.schedule, stages=replace(stages, eval_windows=None)))


@switch("paired", "pairs of heads that share a softmax")
def _(recipe: Recipe) -> Recipe:
    return _mixers(recipe, lambda m: replace(m, paired=False))


@switch("key_offset", "parts of keys from the token before")
def _(recipe: Recipe) -> Recipe:
    return _mixers(recipe, lambda m: replace(m, key_offset=()))


@switch("head_gate", "the gates on heads' outputs")
def _(recipe: Recipe) -> Recipe:
    return _mixers(recipe, lambda m: replace(m, head_gate=None))


@switch("xsa", "exclusive self-attention")
def _(recipe: Recipe) -> Recipe:
    return _mixers(recipe, lambda m: replace(m, xsa=None))


@switch("compose", "the composition of heads")
def _(recipe: Recipe) -> Recipe:
    return _mixers(recipe, lambda m: replace(m, compose=None))


@switch("separate_qk", "queries and keys orthogonalised by pairs of heads; one matrix with the values")
def _(recipe: Recipe) -> Recipe:
    return _mixers(recipe, lambda m: replace(m, separate_qk=False))


# --- the rest of the model ------------------------------------------------------------------------------------------


@switch("relu2", "squared ReLU; GELU (and so no MLP in FP8)")
def _(recipe: Recipe) -> Recipe:
    def change(layer: LayerSpec) -> LayerSpec:
        if layer.mlp is None or layer.mlp.activation != "relu2":
            return layer
        return replace(layer, mlp=replace(layer.mlp, activation="gelu"))

    changed = _layers(recipe, change)
    return recipe if changed == recipe else _precision(changed, fp8_mlp=None)


@switch("zero_init", "projections and head that start at zero; at random, as the other matrices")
def _(recipe: Recipe) -> Recipe:
    init = recipe.model.init
    head = "as_linear" if init.head == "zero" else init.head
    projections = "as_linear" if init.projections == "zero" else init.projections
    return _model(recipe, init=replace(init, head=head, projections=projections))


@switch("embed_norm", "the norm of embeddings")
def _(recipe: Recipe) -> Recipe:
    return _model(recipe, embed_norm=False)


@switch("x0", "the embedding offered again to layers")
def _(recipe: Recipe) -> Recipe:
    return _drop(recipe, lambda source: source == "x0")


@switch("skips", "what layers take over from earlier ones, besides the stream")
def _(recipe: Recipe) -> Recipe:
    taps = _taps(recipe)
    return _drop(recipe, lambda source: source in taps)


@switch("backout", "what the head sees besides the last stream")
def _(recipe: Recipe) -> Recipe:
    return _model(recipe, output=tuple(term for term in recipe.model.output if term.source == "x"))


@switch("residual_weights", "learned weights of the stream and of sub-layers' outputs; their initial values, fixed")
def _(recipe: Recipe) -> Recipe:
    def change(term: Term) -> Term:
        learned = term.source in ("x", "mixer", "mlp") and isinstance(term.weight, Scalar) and not term.weight.sigmoid
        return replace(term, weight=Fixed(value=term.weight.init)) if learned else term  # type: ignore[union-attr]

    def of_layer(layer: LayerSpec) -> LayerSpec:
        fixed: dict[str, Any] = {name: tuple(change(term) for term in getattr(layer, name)) for name in SUMS}
        return replace(layer, **fixed)

    return _layers(recipe, of_layer)


@switch("dynamic_weights", "weights of sums that nets compute for each token; learned numbers")
def _(recipe: Recipe) -> Recipe:
    def still(weight: Any) -> Any:
        if isinstance(weight, Column):
            return Scalar(init=weight.init, role="still")
        if isinstance(weight, Product):
            return replace(weight, factors=tuple(still(factor) for factor in weight.factors))
        return weight

    return replace(recipe, model=_mapped(recipe.model, Term, lambda term: replace(term, weight=still(term.weight))))


@switch("smear", "a share of the token before in each embedding")
def _(recipe: Recipe) -> Recipe:
    return _model(recipe, smear=None)


@switch("bigram", "the table of hashed pairs of tokens")
def _(recipe: Recipe) -> Recipe:
    return _model(_drop_everywhere(recipe, lambda source: source == "bigram"), bigram=None)


@switch("longer_ngrams", "n-grams beyond pairs in the hashed table")
def _(recipe: Recipe) -> Recipe:
    bigram = recipe.model.bigram
    return recipe if bigram is None else _model(recipe, bigram=replace(bigram, orders=(2,), longer_rows=0))


@switch("signs", "the signs that tell apart pairs of tokens which share a row")
def _(recipe: Recipe) -> Recipe:
    bigram = recipe.model.bigram
    return recipe if bigram is None else _model(recipe, bigram=replace(bigram, signs=0))


@switch("early_reads", "the earlier stream that late attention reads; the present one")
def _(recipe: Recipe) -> Recipe:
    return _layers(recipe, lambda layer: replace(layer, reads="x"))


@switch("ngrams", "the tables of the last n tokens")
def _(recipe: Recipe) -> Recipe:
    return _model(recipe, ngrams=None)


@switch("softcap", "the cap on logits")
def _(recipe: Recipe) -> Recipe:
    return _model(recipe, softcap=None)


@switch("head_copy", "the embedding tied to the head in the first stages; two tensors from the start")
def _(recipe: Recipe) -> Recipe:
    stages = recipe.schedule.stages
    if not recipe.model.head_copy:
        return recipe
    if stages is not None:
        recipe = replace(recipe, schedule=replace(recipe.schedule, stages=replace(stages, split_stage=None)))
    return _model(recipe, head_copy=False)


# --- loss and precision ---------------------------------------------------------------------------------------------


@switch("mtp", "the prediction of further tokens than the next")
def _(recipe: Recipe) -> Recipe:
    return _losses(recipe, lambda loss: replace(loss, tokens=(1.0,)))


@switch("prefix_loss", "the loss on targets' prefixes")
def _(recipe: Recipe) -> Recipe:
    return _losses(recipe, lambda loss: replace(loss, prefix=0.0))


@switch("fp8_head", "the head's product in FP8; bf16")
def _(recipe: Recipe) -> Recipe:
    return _precision(recipe, fp8_head=None)


@switch("fp8_mlp", "MLPs in FP8; bf16")
def _(recipe: Recipe) -> Recipe:
    return _precision(recipe, fp8_mlp=None)


@switch("fp8_projections", "attention's projections in FP8; bf16")
def _(recipe: Recipe) -> Recipe:
    return _precision(recipe, fp8_projections=None)


# --- training -------------------------------------------------------------------------------------------------------


@switch("growing_batch", "batches that grow; their mean from the start")
def _(recipe: Recipe) -> Recipe:
    stages, train = recipe.schedule.stages, recipe.train
    if stages is None or len(set(recipe.batches().values())) == 1:
        return recipe
    unit = train.lanes * (1 if recipe.data.order == "documents" else recipe.model.seq_len)
    total = sum(stage.share * stage.batch_tokens for stage in stages.stages)
    batch = round(total / sum(stage.share for stage in stages.stages) / unit) * unit
    changed = _stages(recipe, lambda stage: replace(stage, batch_tokens=batch))
    return replace(changed, train=replace(train, batch_tokens=batch))


@switch("document_cut", "the cut of long documents; each is as long as a row at most")
def _(recipe: Recipe) -> Recipe:
    if recipe.data.order != "documents":
        return recipe
    lanes = recipe.train.lanes
    return _stages(recipe, lambda stage: replace(stage, max_document=stage.batch_tokens // lanes))


@switch("muon", "Muon; AdamW with rate and decay of recipe gpt2-rotary")
def _(recipe: Recipe) -> Recipe:
    def change(group: ParamGroup) -> ParamGroup:
        if not isinstance(group.rule, MuonConfig):
            return group
        return replace(group, rule=ADAM, lr=ADAM_LR, lr_scale=1.0, weight_decay=ADAM_DECAY, storage="fp32")

    return _groups(recipe, change)


@switch("normuon", "Muon's variance reduction")
def _(recipe: Recipe) -> Recipe:
    return _rules(recipe, variance_beta=None)


@switch("polar_express", "Polar Express; Newton-Schulz with fixed coefficients")
def _(recipe: Recipe) -> Recipe:
    return _rules(recipe, orthogonalizer="ns5")


@switch("cautious_decay", "decay only where the step shrinks a weight; everywhere, as strong at the full rate")
def _(recipe: Recipe) -> Recipe:
    def change(group: ParamGroup) -> ParamGroup:
        rule = group.rule
        if not isinstance(rule, MuonConfig | AdamConfig) or rule.decay != "cautious":
            return group
        # Cautious decay takes lr^2 x decay, plain decay lr x decay.
        return replace(group, rule=replace(rule, decay="plain"), weight_decay=group.weight_decay * group.lr)

    return _groups(recipe, change)


@switch("weight_decay", "all weight decay")
def _(recipe: Recipe) -> Recipe:
    return _groups(recipe, lambda g: replace(g, weight_decay=0.0))


@switch("bf16_weights", "weights stored in bf16; fp32")
def _(recipe: Recipe) -> Recipe:
    return _groups(recipe, lambda g: replace(g, storage="fp32"))


@switch("every_other", "groups that move at every second step only; at every step")
def _(recipe: Recipe) -> Recipe:
    return _groups(recipe, lambda g: replace(g, every=1, gradient="sum"))


@switch("last_gradient", "a head whose gradient is made at its updates alone; at every step")
def _(recipe: Recipe) -> Recipe:
    return _groups(recipe, lambda g: replace(g, gradient="sum"))


@switch("momentum_warmup", "the schedule of Muon's momentum; constant")
def _(recipe: Recipe) -> Recipe:
    if not any(isinstance(group.rule, MuonConfig) for group in recipe.groups):
        return recipe  # nothing follows the momentum
    return replace(recipe, schedule=replace(recipe.schedule, momentum=None))


@switch("lr_floor", "the floor of the learning rate; it falls to zero")
def _(recipe: Recipe) -> Recipe:
    stages, lr = recipe.schedule.stages, recipe.schedule.lr
    if stages is not None:
        return replace(recipe, schedule=replace(recipe.schedule, stages=replace(stages, floor=0.0)))
    return replace(recipe, schedule=replace(recipe.schedule, lr=replace(lr, floor=0.0)))


@switch("lr_cooldown", "the cool-down of the learning rate")
def _(recipe: Recipe) -> Recipe:
    stages, lr = recipe.schedule.stages, recipe.schedule.lr
    if stages is not None:
        return replace(recipe, schedule=replace(recipe.schedule, stages=replace(stages, cooldown=0.0)))
    return replace(recipe, schedule=replace(recipe.schedule, lr=replace(lr, cooldown_steps=0)))


@switch("grad_clip", "the clipping of gradients")
def _(recipe: Recipe) -> Recipe:
    return replace(recipe, train=replace(recipe.train, grad_clip=None))
