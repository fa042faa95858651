"""What became of gradients between a backward and the change of the weights, in a sample."""

from __future__ import annotations

from nanstop.records.record import record
from nanstop.records.values import SourceLine, StepId


@record
class Contribution:
    """What one backward added to the sampled gradients.

    ``num_bad``: elements that it left not finite. ``is_lost``: it was gone again before the next
    backward of the window. ``is_again``: it came from the very loss, or batch, of the backward
    before, and is equal to what that had added, or to what lay there ahead of the first backward
    and no update had left. ``reached_others``: its graph also ended in tensors that no
    optimizer holds: it may have been asked for their gradients.
    """

    norm: float
    num_bad: int = 0
    is_lost: bool = False
    is_again: bool = False
    reached_others: bool = False
    source: SourceLine | None = None


@record
class GradientAccount:
    """The gradients of one optimizer from one update to the next, in a sample of its parameters.

    Norms are 2-norms over the ``num_elements`` of the sample. ``arrived``: what was there when the
    last backward was through; ``consumed``: as the optimizer took it. ``factor``: by which the
    first became the second, None where no single number did.
    """

    at: StepId
    optimizer: str
    num_elements: int
    contributions: tuple[Contribution, ...] = ()
    arrived: float = 0.0
    consumed: float = 0.0
    norm: float | None = None
    """The norm of all gradients as the host has read it ahead of the update, None where it did
    not."""
    factor: float | None = None
    scale: float = 1.0
    """The loss scale of a scaler that is on ``arrived``."""
    loss_factor: float | None = None
    """What the script itself multiplied the mean by that is each loss of the window; None where
    that is not known, or a loss is no mean."""
    are_means: bool = False
    """Whether that is all that was made of the elements that a loss function of torch gave."""
    is_scaled_apart: bool = False
    """Whether that is a power of 2 and no count of what was averaged, and the script holds the loss
    without it alone: the backward was given a multiple that nobody else reads."""
    stages: tuple[float | None, ...] = ()
    """By what each change of one parameter's gradient multiplied it after the last backward, None
    where no single number did; empty where that was not looked for."""
    norm_consumed: float | None = None
    """The norm of all gradients that the optimizer took, where ``loss_factor`` is that of a loss
    scale."""
    rate: float | None = None
    """The number by which the update followed what was consumed, None where no single one did."""
    given_rate: float | None = None
    """The learning rate that the optimizer had at the update, None where it had several."""
    num_with_gradient: int | None = None
    """Parameters of the optimizer that had a gradient at the update, None where it was not
    counted."""
    num_asked: int = 0
    """How often an update was asked for in a whole run that has made none; 0 where one was made."""
    lacks_backwards: bool = False
    """Whether such a run has made no backward either."""
    num_replaced: int = 0
    """Parameters that got gradients and are in no optimizer, each of the shape of one that this
    optimizer holds and that got none; 0 where some have no such counterpart."""
    num_unheld: int = 0
    """Parameters that got gradients and are in no optimizer."""
    was_reached: bool = False
    """Whether any that this one holds had a gradient at an update so far, looked at or not."""
    num_at_the_end: int = 0
    """Tensors of the model's last layer that get gradients, are in no optimizer and have kept their
    values since the first look, where all that comes before them is held."""
    made_at: SourceLine | None = None
    """The line that made the optimizer, None where that was not seen."""
    is_carried: bool = False
    """Whether the window began on what the update before it had consumed, which was not zero, and
    ``consumed`` still holds that."""
    num_hidden: int = 0
    """Elements that the last backward left not finite and the optimizer took as numbers."""
    until_unscale: float | None = None
    """The factor by which gradients had been multiplied when the scaler came to unscale them;
    None where no single number did, or it never came."""
    norm_at_unscale: float | None = None
    """The norm of all gradients then, where they were not as the last backward had left them."""
    share_moved: float = 0.0
    """How many of the sampled weights the update changed."""
    share_lost: float = 0.0
    """How many of those that have a gradient it left as they were."""
    shrunk: float = 0.0
    """By which share of themselves it made the weights smaller, beside what it made of their
    gradients."""
    updated_at: tuple[SourceLine, ...] = ()
    """The line that asked the optimizer for the update, or those that wrote to the weights."""
    is_own: bool = False
    """Whether the script makes its updates by itself, with no optimizer."""
    asked: float | None = None
    """The largest number that such an update was to add to a weight, None where it was not seen."""
    elsewhere_at: tuple[SourceLine, ...] = ()
    """Lines that made an update of a weight into another tensor: of a copy of it, or a new one."""
    num_states_moved: int = 0
    """Tensors that took up the gradients of one parameter in such updates, and take up those of
    another one since."""
    states_at: tuple[SourceLine, ...] = ()
    """The line that has them do so, and those that say which are whose."""
    share_squares_lost: float = 0.0
    """How many squares of a tensor's gradients, of those that are not 0, are 0 in float16 where
    such an update divides by what it has made of them: the most of all tensors."""
    squares_lost_at: tuple[SourceLine, ...] = ()
    """The lines that made them 0."""
    given_at: tuple[SourceLine, ...] = ()
    """Lines that gave a value to what such an update goes through, where it leaves weights out or
    is of others, or to what it is multiplied by, where that is 0; empty else."""
    num_still: int = 0
    """Sampled tensors that no such update has changed since the first, where it changes others."""
    is_put_back: bool = False
    """Whether the next forward after the update before found the weights as they had been ahead
    of that update, which had changed them."""
    rounded_to: str = ""
    """What every sampled weight was rounded to between the update before and the next forward: the
    name of a format that is narrower than the one it is held in."""
    share_undone: float = 0.0
    """Of the sampled weights that the update before changed: how many that forward found as they
    had been, bit for bit."""
    rewritten_at: tuple[SourceLine, ...] = ()
    """Lines that wrote to the weights between that update and that forward; empty where that was
    not looked for."""
    were_weights_still: bool = True
    """Whether the weights were the same at every backward and at the update."""
    is_only: bool = True
    """Whether no other optimizer is at work in this process."""
    was_read: bool | None = None
    """Whether a line computed with gradients between those; None where that was not looked for."""
    overflowed_at: tuple[SourceLine, ...] = ()
    """Lines that made numbers which are not finite of gradients that were; empty where that was
    not looked for."""
    changed_at: tuple[SourceLine, ...] = ()
    """Lines that wrote to gradients between the window's backwards and its update; empty where
    that was not looked for."""
    is_changed_alike: bool = False
    """Whether all that changed them then was seen to do the same in each step: no condition chooses
    it, and no number of the script goes into it."""
    called_at: tuple[SourceLine, ...] = ()
    """Lines that called the functions in which those are, in the order of their calls, where these
    are others than the one that calls the backward."""
