"""How a run was set up: what its options ask for, and what its model was made into."""

from __future__ import annotations

from nanstop.records.record import record
from nanstop.records.values import LineNumber, SourceLine


@record
class PrecisionFacts:
    """The format that options ask for, and which do; ``RunFacts.autocast`` is in force."""

    requested: str | None = None
    option: str = ""
    tf32: bool | None = None


@record
class QuantizedFacts:
    """A base whose weights are packed.

    ``half_rest``: its other floating-point parameters (norms, embedding, head) in half precision,
    which ``prepare_model_for_kbit_training`` stores in float32. ``trained_base``: parameters of the
    base itself that are trained. ``num_adapted``: trainable parameters beside the base: adapters
    and saved modules.
    """

    method: str
    bits: int
    num_layers: int = 0
    compute_dtype: str | None = None
    half_rest: str | None = None
    trained_base: tuple[str, ...] = ()
    num_adapted: int = 0


@record
class AdapterFacts:
    """What PEFT's config of the active adapter says. ``idle``: adapters that are there and take no
    part in a forward.
    """

    kind: str
    task_type: str | None = None
    target_modules: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()
    rank: int | None = None
    alpha: float | None = None
    idle: tuple[str, ...] = ()


@record
class HeadFacts:
    """The head of a classifying model. ``pads``: whether it knows a padding token, or will."""

    module: str
    trained: bool
    pads: bool = True


@record
class ScheduleFacts:
    """Steps of the whole training, micro-batches on one rank; None for data without length."""

    scheduler: str = ""
    warmup_steps: int = 0
    num_steps: int | None = None
    micros_per_epoch: int | None = None


@record
class RateFacts:
    """The learning rates of updates, and what their schedule gives after them.

    ``num_dead``: the last of ``num_used`` updates whose rates were 0, or as good as that beside the
    ``highest``. ``coming``: the highest rate of the next steps of the schedule, from a copy of it.
    ``num_schedule_steps``: how often it was stepped, ``num_micro``: micro-batches of an update.
    ``planned``: of a whole training, before its first step. ``rising``: over how many steps the
    schedule was asked and its rate went on to rise, 0 where it came to its peak. ``length``: steps
    from its beginning to its end, or to its lowest rate where it has none, of a schedule that is as
    long as its run has updates and was stepped far more rarely; else 0. ``set_at``: the line of the
    script that sets the rate, where there is no schedule and its own expression was asked.
    ``is_given``: the optimizer was made with it, and nothing was seen that sets another.
    ``lowest``: the rate of an update that goes up its gradient, below 0, or what will be one; else
    0.
    """

    num_used: int
    num_dead: int
    highest: float
    coming: float
    num_schedule_steps: int = 0
    num_micro: int = 1
    planned: bool = False
    rising: int = 0
    length: int = 0
    set_at: SourceLine | None = None
    is_given: bool = False
    lowest: float = 0.0


@record
class ClippingFacts:
    """The first ``num_updates`` updates, ahead of each of which gradients were clipped to ``limit``
    when there were none, or (``is_late``) after the one before had taken them, or those of no
    parameters (``is_of_none``). ``norm``: the largest that one of them took. ``at``: the line that
    clips.
    """

    num_updates: int
    limit: float
    norm: float
    is_late: bool = False
    is_of_none: bool = False
    at: SourceLine | None = None


@record
class ModeFacts:
    """A model that was trained in training mode, ``num_train`` updates long, and in evaluation mode
    since, ``num_eval``, in which a validation has left it. ``modules``: those that act in training
    mode alone, or otherwise. ``at``: the line that put it in evaluation mode.
    """

    num_train: int
    num_eval: int
    modules: tuple[str, ...] = ()
    at: SourceLine | None = None


@record
class TextFacts:
    """Ids of the tokens that begin, end and pad a text, and where texts are cut.

    ``most_tokens``: the length that the host or its tokenizer cuts rows at, None where several
    texts share a row. ``masking``: the option that takes tokens out of the loss.
    """

    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None
    most_tokens: int | None = None
    masking: str = ""


@record
class DataFacts:
    """Rows of the first micro-batches as the model gets them, counted.

    ``num_without_labels``: of ``num_labelled``, those of which no token is trained on.
    ``num_twice_begun``: those that begin with two tokens of a beginning. ``num_cut``: those that
    fill all places and hold no token of an end. ``masked_at``: lines that took labels out of the
    loss, FILE:LINE, as far as they are known. ``num_shortened``: rows that end before the text does
    that a tokenizer was given. ``tokenized_at``: the lines that asked for the tokens of rows,
    ``shortened_at``: that cut them where no tokenizer did. ``only_label``: the one token that every
    label of a language model is, None where there are others. ``num_ends``: rows in which an end
    comes right after a token that is trained on; ``num_ends_ignored``: those of which no such end
    is.
    """

    num_rows: int = 0
    num_labelled: int = 0
    num_without_labels: int = 0
    num_twice_begun: int = 0
    num_cut: int = 0
    masked_at: tuple[str, ...] = ()
    num_shortened: int = 0
    only_label: int | None = None
    num_ends: int = 0
    num_ends_ignored: int = 0
    tokenized_at: tuple[str, ...] = ()
    shortened_at: tuple[str, ...] = ()


@record
class ObjectiveFacts:
    """``beta``: of DPO the inverse temperature, of GRPO and RLOO the weight of the KL term.
    ``rewards_at``: where the reward functions are defined, by the name that the trainer gives each.
    ``reward_models``: the name and the weights' format of each that is a model. ``bad_weights``: of
    each whose rewards were no numbers, its name and a weight that is not finite. ``entries_at``:
    the lines at which the trainer's own class puts an entry into a batch, by the entry's name.
    """

    method: str
    beta: float | None = None
    num_generations: int | None = None
    rewards_at: tuple[SourceLine, ...] = ()
    reward_models: tuple[tuple[str, str], ...] = ()
    bad_weights: tuple[tuple[str, str], ...] = ()
    entries_at: tuple[SourceLine, ...] = ()


@record
class GradientEnd:
    """The operation, as torch names it, that is sent a gradient which is not 0 and passes on none.
    ``source``: its line, None where only torch's own code is on the stack. ``factors``: the numbers
    of the program's that are 0 and that it multiplies with, as its line spells them.
    """

    op: str
    source: SourceLine | None = None
    factors: tuple[LineNumber, ...] = ()


@record
class GradientPath:
    """Which trainable elements an update can reach.

    ``num_updated``: those that the optimizer holds; None without an optimizer. ``reentrant``:
    blocks are recomputed by reentrant checkpointing, through which only inputs that require
    gradients carry any. ``inputs_require_grad``: of the embedding's output; None where it was not
    asked. ``num_reached``: tensors that one backward gave a gradient, of ``num_tensors``; None
    where none was run. ``cut``: tensors that an optimizer holds and that got no gradient in its
    first updates although the loss depends on them, or whose module is only run without a graph;
    ``cut_at``: FILE:LINE of that. ``lost_at``: FILE:LINE of what leaves the graph, where one does.
    ``behind``: tensors whose gradients were zeros in its first updates, and are none with the
    operation at ``flat_at`` (FILE:LINE) passed by, whose derivative is 0: a step's, or ``is_own``,
    that of a difference or a quotient of equals. ``zeroed_at``: the line that multiplies the whole
    loss by a 0 which stands there. ``copied``: weights of which all rows are alike, update after
    update, and get the same gradient.
    ``replaced``: parameters with gradients that are in no optimizer and have taken the place of
    those that it holds, later than update ``replaced_after``. ``reached_until``: the last update
    with a gradient, where there were some before ``num_reached`` was 0. ``zeros``: entries of the
    batch that are all 0 where every gradient is, and by ones in which some arrives. ``dropped``:
    modules that drop all they are given, and by half of which some arrives. ``end``: where
    the gradient ends, where every trained tensor's is 0. ``is_off``: gradients were
    switched off when the script met its last exception.
    """

    num_trainable: int
    num_tensors: int
    num_updated: int | None = None
    reentrant: bool = False
    inputs_require_grad: bool | None = None
    num_reached: int | None = None
    unreached: tuple[str, ...] = ()
    stuck: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    cut: tuple[str, ...] = ()
    cut_at: str = ""
    lost_at: str = ""
    behind: tuple[str, ...] = ()
    flat_at: str = ""
    is_own: bool = False
    zeroed_at: SourceLine | None = None
    replaced: tuple[str, ...] = ()
    replaced_after: int = 0
    reached_until: int | None = None
    zeros: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    end: GradientEnd | None = None
    is_off: bool = False
