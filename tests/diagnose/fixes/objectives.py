"""The fixes of NS118 and of 7xx and 8xx: objectives, rewards, logs."""

import copy
import math

import torch
from torch import nn
from torch.nn import functional as F

import tiny
from diagnose.fixes.forward import LARGE
from diagnose.fixes.kinds import HEALTHY, Fixes, backpropagated, close, sound
from diagnose.fixes.setup_formats import IDS, loss_of
from diagnose.fixes.values import ratio

FIXES = Fixes()
LABELS = torch.tensor([0, 1])


# NS118 - an objective that is fed with the wrong thing
FIXES.twin("NS118", 1)


@FIXES.plant("NS118", 2)
def logarithms_of_probabilities(fixed):
    """As far as probabilities are above the clamp, the gradient is that of the cross entropy."""

    def loss(x):
        p = x.softmax(-1)
        return F.nll_loss(p.clamp(min=1e-12).log(), LABELS) if fixed else F.cross_entropy(p, LABELS)

    found = backpropagated(loss, HEALTHY)
    return all(map(close, found, backpropagated(lambda x: F.cross_entropy(x, LABELS), HEALTHY)))


@FIXES.plant("NS118", 2)
def binary_cross_entropy_of_probabilities(fixed):
    target = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
    exact = lambda x: F.binary_cross_entropy_with_logits(x, target)  # noqa: E731
    form = (
        (lambda x: F.binary_cross_entropy(x.sigmoid(), target))
        if fixed
        else (lambda x: F.binary_cross_entropy_with_logits(x.sigmoid(), target))
    )
    return all(map(close, backpropagated(form, HEALTHY), backpropagated(exact, HEALTHY)))


@FIXES.cost("NS118", 2)
def no_gradient_below_the_clamp():
    """A class that is as good as excluded: the scores teach, their probabilities do not."""
    lost = LARGE.flip(-1)[:, [0, 1, 2]]
    wrong = torch.tensor([1])
    by_p = backpropagated(lambda x: F.nll_loss(x.softmax(-1).clamp(min=1e-12).log(), wrong), lost)
    by_score = backpropagated(lambda x: F.cross_entropy(x, wrong), lost)
    half = F.nll_loss(torch.zeros(1, 3).half().clamp(min=1e-12).log().float(), wrong)
    binary = backpropagated(
        lambda x: F.binary_cross_entropy(x.sigmoid(), torch.ones(())), torch.tensor(-200.0)
    )
    none = not by_p[1].any() and by_score[1].abs().max() == 1 and half.isinf()
    return bool(none) and binary == (100.0, 0.0)


@FIXES.plant("NS118", 3)
def scores_before_nll_loss(fixed):
    exact = backpropagated(lambda x: F.cross_entropy(x, LABELS), HEALTHY)
    forms = (lambda x: F.nll_loss(x.log_softmax(-1), LABELS),) if fixed else ()
    forms = forms or (lambda x: F.nll_loss(x, LABELS),)
    return all(all(map(close, backpropagated(form, HEALTHY), exact)) for form in forms)


@FIXES.plant("NS118", 4)
def outputs_in_the_shape_of_targets(fixed):
    """A layer that could fit its targets exactly."""
    targets = HEALTHY @ torch.tensor([1.0, -1.0, 0.5])
    forms = (lambda y: (y.squeeze(-1), targets), lambda y: (y, targets[:, None]))
    for form in forms if fixed else (lambda y: (y, targets),):
        layer = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
        for _ in range(300):
            output, target = form(layer(HEALTHY))
            loss = (output - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if not sound(layer.weight) or loss.item() > 1e-3:
            return False
    return True


@FIXES.plant("NS118", 5)
def a_reference_of_its_own(fixed):
    policy = nn.Linear(3, 3)
    reference = copy.deepcopy(policy) if fixed else policy
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.5)
    for _ in range(5):
        optimizer.zero_grad()
        F.cross_entropy(policy(HEALTHY), LABELS).backward()
        optimizer.step()
    logps, ref_logps = policy(HEALTHY).log_softmax(-1), reference(HEALTHY).log_softmax(-1)
    kl = (logps.exp() * (logps - ref_logps.detach())).sum()
    return sound(kl) and kl.item() > 0.01


@FIXES.cost("NS118", 5)
def a_models_memory():
    policy = tiny.llama()
    memory = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    theirs = {p.untyped_storage().data_ptr() for p in copy.deepcopy(policy).parameters()}
    return len(theirs) == len(memory) and not memory & theirs


@FIXES.plant("NS118", 6)
def the_mask_is_turned(fixed):
    """1 marks padding where the loss asks for what is real."""
    padding = torch.tensor([[False, False, True], [False, True, True]])
    for mask in (~padding, 1 - padding.long()) if fixed else (padding, padding.long()):
        _, gradient = backpropagated(lambda x, m=mask: (x * m).square().sum() / m.sum(), HEALTHY)
        if gradient[padding].any() or not gradient[~padding].all():
            return False
    return True


def padded_with_the_end(fixed):
    """Labels of "a </s> </s>", where the end pads too."""
    ids, mask = torch.tensor([[5, 1, 1]]), torch.tensor([[1, 1, 0]])
    labels = ids.clone()
    labels[mask == 0 if fixed else ids == 1] = -100
    return labels.tolist() == [[5, 1, -100]]


FIXES.plant("NS118", 8)(padded_with_the_end)


@FIXES.plant("NS118", 7)
def a_penalty_with_a_graph(fixed):
    """The derivative of w x by x is w, and that of its square's mean by w is 2 w / 3."""
    weight, x = torch.tensor([1.0, -2.0, 0.5], requires_grad=True), HEALTHY.clone().requires_grad_()
    (asked,) = torch.autograd.grad((x @ weight).sum(), x, create_graph=fixed)
    penalty = asked.square().mean() + 0.0 * weight.sum()
    (gradient,) = torch.autograd.grad(penalty, weight)
    return close(gradient, 2.0 * weight.detach() / 3.0)


@FIXES.plant("NS118", 9)
def a_target_of_logarithms(fixed):
    """A divergence from a teacher, of logarithms: the loss is finite, and 0 for a student alike."""
    target = HEALTHY.log_softmax(-1)
    how = {"log_target": True} if fixed else {}
    loss = F.kl_div(HEALTHY.log_softmax(-1), target, reduction="batchmean", **how)
    return close(loss, torch.zeros(()))


@FIXES.plant("NS118", 9)
def a_target_of_probabilities(fixed):
    """A divergence that is told of logarithms, of a student alike: it is 0."""
    target = HEALTHY.log_softmax(-1) if fixed else HEALTHY.softmax(-1)
    loss = F.kl_div(HEALTHY.log_softmax(-1), target, reduction="batchmean", log_target=True)
    return close(loss, torch.zeros(()))


@FIXES.plant("NS118", 10)
def targets_with_signs(fixed):
    """The gradient is that of a binary cross entropy of the same labels."""
    labels = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
    targets = 2 * labels - 1 if fixed else labels
    found = backpropagated(lambda x: F.soft_margin_loss(x, targets), HEALTHY)
    exact = backpropagated(lambda x: F.binary_cross_entropy_with_logits(x, labels), HEALTHY)
    return all(map(close, found, exact))


@FIXES.plant("NS118", 11)
def a_mask_of_booleans(fixed):
    """The first of three tokens reads itself alone, whatever the others are."""
    forwards = torch.ones(3, 3, dtype=torch.bool).tril()
    mask = forwards if fixed else forwards.float()
    text, other = HEALTHY[None, :1].repeat(1, 3, 1), HEALTHY[None, :1].repeat(1, 3, 1)
    other[:, 1:] += 5.0
    first, second = (
        F.scaled_dot_product_attention(x, x, x, attn_mask=mask)[:, 0] for x in (text, other)
    )
    return close(first, second)


@FIXES.plant("NS118", 12)
def outputs_without_a_bound(fixed):
    """However far the weights go, a sigmoid is half a target away from -0.5."""
    outputs = torch.tensor([-0.5, 0.5]) if fixed else torch.tensor([-1e4, 0.0]).sigmoid()
    return close(outputs, torch.tensor([-0.5, 0.5]))


# NS701 - rewards that teach nothing
FIXES.say("NS701", 1, "a look at what a function returns")
FIXES.twin("NS701", 2)


def silent_share(number, chance):
    """How many of 2000 groups of ``number`` attempts all end alike."""
    drawn = torch.rand(2000, number) < chance
    return (drawn.all(1) | ~drawn.any(1)).float().mean().item()


@FIXES.plant("NS701", 3)
def larger_groups(fixed):
    """Of groups of 2 at a chance of 0.1 have 82 % no signal, of 16 less than 19 %."""
    found, number = silent_share(16 if fixed else 2, 0.1), 16 if fixed else 2
    assert abs(found - (0.9**number + 0.1**number)) < 0.04
    return found < 0.25


@FIXES.plant("NS701", 3)
def a_higher_temperature(fixed):
    """A policy that is sure of one of two answers."""
    logits = torch.tensor([4.0, 0.0]) / (2.0 if fixed else 1.0)
    return silent_share(8, logits.softmax(-1)[1].item()) < 0.5


@FIXES.plant("NS701", 4)
def chosen_and_rejected_differ(fixed):
    policy = tiny.llama()
    other = IDS.clone()
    if fixed:
        other[0, -1] = 20
    margin = loss_of(policy) - policy(input_ids=other, labels=other).loss
    (-F.logsigmoid(-0.1 * margin)).backward()
    gradient = policy.lm_head.weight.grad
    return sound(gradient) and gradient.abs().max().item() > 1e-6


@FIXES.plant("NS701", 5)
def prompts_that_are_solved_sometimes(fixed):
    """Most groups of a batch have a gradient behind the filter."""
    chances = [0.0, 0.0, 1.0, 1.0, 0.5, 0.4]
    chances = [c for c in chances if 0 < c < 1] if fixed else chances
    return sum(silent_share(8, chance) for chance in chances) / len(chances) < 0.1


# NS702 - ratios
@FIXES.plant("NS702", 1)
def a_clamped_log_ratio(fixed):
    """A token 200 nats off beside healthy ones, and padding that is masked before or behind."""
    log_ratio = torch.cat([HEALTHY, LARGE, torch.full((1, 3), 300.0)])
    mask = torch.ones(4, 3)
    mask[3] = 0.0

    def loss(x):
        if fixed:
            x = torch.where(mask.bool(), x, 0.0).clamp(max=5.0)
        return (x.exp() * mask).sum()

    value, gradient = backpropagated(loss, log_ratio)
    _, right = backpropagated(ratio, HEALTHY)
    return sound(value, gradient) and close(gradient[:2], right) and not gradient[3].any()


@FIXES.cost("NS702", 1)
def what_a_token_at_the_bound_weighs():
    weights = [backpropagated(ratio, torch.tensor([bound])) for bound in (5.0, 20.0)]
    (low, slope), (high, steep) = weights
    return round(low.item()) == round(slope.item()) == 148 and 4.8e8 < high < 4.9e8 < 2 * steep


def drift(updates, *, beta=0.0, tokens=1, clip=None, lr=0.5):
    """The log-ratio of the chosen token after ``updates`` of one batch, and the last loss."""
    logits = nn.Parameter(torch.zeros(4))
    old = logits.detach().log_softmax(-1)
    optimizer = torch.optim.SGD([logits], lr=lr)
    for _ in range(updates):
        logps = logits.log_softmax(-1)
        gain = (tokens * (logps[0] - old[0])).exp()
        if clip is not None:
            gain = torch.minimum((logps[0] - old[0]).exp().clamp(max=clip), torch.tensor(clip))
        kl = (old - logps).exp() - (old - logps) - 1
        optimizer.zero_grad()
        (-gain + beta * kl.sum()).backward()
        optimizer.step()
    return (logits.log_softmax(-1) - old)[0].item(), gain.item()


@FIXES.plant("NS702", 2)
def fewer_updates_of_a_batch(fixed):
    return abs(drift(2 if fixed else 40, lr=0.2)[0]) < 0.5


@FIXES.plant("NS702", 2)
def a_smaller_rate(fixed):
    return abs(drift(40, lr=0.005 if fixed else 0.5)[0]) < 0.5


@FIXES.plant("NS702", 3)
def ratios_of_tokens(fixed):
    """200 tokens of 0.5 nats each: their product leaves float32, the clipped ones do not."""
    log_ratio = torch.full((200,), 0.5)
    if fixed:
        value, gradient = backpropagated(lambda x: x.exp().clamp(0.8, 1.2).mean(), log_ratio)
    else:
        value, gradient = backpropagated(lambda x: x.sum().exp(), log_ratio)
    return sound(value, gradient)


@FIXES.plant("NS702", 4)
def a_larger_beta(fixed):
    return abs(drift(40, beta=2.0 if fixed else 0.0, lr=0.1)[0]) < 0.5


# NS703 - two sides that differ
FIXES.twin("NS703", 1)


def logps_of(model, ids, **options):
    logits = model(input_ids=ids, **options).logits[:, :-1].float().log_softmax(-1)
    return logits.gather(-1, ids[:, 1:, None])[..., 0].detach()


@FIXES.plant("NS703", 1)
def no_dropout_in_the_policy(fixed):
    model = tiny.llama(attention_dropout=0.0 if fixed else 0.5)
    return close(logps_of(model.train(), IDS), logps_of(model.eval(), IDS))


@FIXES.plant("NS703", 2)
def positions_from_the_mask(fixed):
    """A model of absolute positions, its prompt padded on the left."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 12, "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 32}
    model = GPT2LMHeadModel(GPT2Config(**sizes)).eval()
    with torch.no_grad():
        model.transformer.wpe.weight.normal_(std=1.0)
    padded, mask = F.pad(IDS, (4, 0)), F.pad(torch.ones_like(IDS), (4, 0))
    positions = (mask.cumsum(-1) - 1).clamp(min=0) if fixed else torch.arange(12)[None]
    found = logps_of(model, padded, attention_mask=mask, position_ids=positions)
    return close(found[:, 4:], logps_of(model, IDS))


@FIXES.plant("NS703", 3)
def one_format_on_both_sides(fixed):
    model = tiny.llama()
    with torch.no_grad():
        model.lm_head.weight.mul_(50.0)
    policy = logps_of(model, IDS)
    if not fixed:
        model.to(torch.bfloat16)
    return bool(((logps_of(model, IDS) - policy).exp() - 1).abs().max() < 1e-3)


@FIXES.plant("NS703", 3)
def a_float32_head(fixed):
    """The head of a bfloat16 model in float32 is nearer to the exact answer of the same states."""
    torch.manual_seed(0)
    states, head = torch.randn(16, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    exact = (states.double() @ head.double()).log_softmax(-1)
    logits = states.float() @ head.float() if fixed else states @ head
    return (logits.double().log_softmax(-1) - exact).abs().max().item() < 1e-3


@FIXES.plant("NS703", 4)
def importance_sampling_with_a_cap(fixed):
    """A sampler at another temperature: the weighted mean of a reward is the policy's again."""
    policy, sampler = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.8, 0.15, 0.05])
    reward = torch.tensor([0.0, 1.0, 2.0])
    weight = (policy / sampler).clamp(max=5.0) if fixed else torch.ones(3)
    return close((sampler * weight * reward).sum(), (policy * reward).sum())


@FIXES.cost("NS703", 4)
def a_cap_that_binds_is_a_bias():
    policy, sampler = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.8, 0.15, 0.05])
    return (sampler * (policy / sampler).clamp(max=2.0)).sum() < 1


# NS704 - rewards that are not finite
FIXES.twin("NS704", 1)


def advantages(rewards):
    return (rewards - rewards.mean()) / (rewards.std() + 1e-4)


def policy_gradient(rewards):
    logits = nn.Parameter(torch.zeros(len(rewards)))
    (-(logits.log_softmax(-1) * advantages(rewards)).mean()).backward()
    return logits.grad


@FIXES.plant("NS704", 2)
def an_assertion_names_the_completion(fixed):
    def reward(completions):
        for number, completion in enumerate(completions):
            r = 1 / len(completion) if completion else math.inf
            assert not fixed or math.isfinite(r), number
            yield r

    try:
        list(reward(["a", "", "bc"]))
    except AssertionError as error:
        return str(error).startswith("1")
    return False


@FIXES.plant("NS704", 3)
def a_bounded_reward(fixed):
    rewards = torch.tensor([0.5, 1e-50, 0.25]).log()
    bounds = (lambda r: r.clamp(min=-10.0), lambda r: (r / 10).tanh())
    forms = bounds if fixed else (lambda r: r,)
    return all(sound(g) and bool(g.any()) for g in (policy_gradient(f(rewards)) for f in forms))


@FIXES.cost("NS704", 3)
def extremes_look_alike():
    return torch.tensor([-20.0, -50.0]).clamp(min=-10).unique().numel() == 1


@FIXES.plant("NS704", 4)
def none_and_another_function(fixed):
    """TRL makes NaN of None, and sums what is there; a completion that nobody scores is 0."""
    scored = torch.tensor([[0.5, math.nan], [math.nan, 0.25], [1.0, 0.0]])
    rewards = scored.nansum(1) if fixed else scored.sum(1)
    return sound(policy_gradient(rewards)) and close(rewards, torch.tensor([0.5, 0.25, 1.0]))


# NS801, NS802 - logs
FIXES.say("NS801", 1, "reading the report")
FIXES.say("NS801", 3, "the finding beside it, whose fixes are planted")
FIXES.say("NS802", 1, "nothing is to be done")


@FIXES.plant("NS801", 2)
def the_filter_is_off(fixed):
    from transformers import Trainer, TrainingArguments

    class Broken(Trainer):
        def compute_loss(self, model, inputs, **options):
            del options
            loss = model(**inputs).loss
            return loss * (math.nan if self.state.global_step else 1.0)

    options = {} if not fixed else {"logging_nan_inf_filter": False}
    arguments = TrainingArguments(**tiny.training_args("out", max_steps=2, **options))
    run = Broken(tiny.llama(), arguments, train_dataset=tiny.TokenRows(8))
    run.train()
    logged = [float(each["loss"]) for each in run.state.log_history if "loss" in each]
    return math.isfinite(logged[0]) and math.isnan(logged[1])
