"""What to type, in words, where no change of the code is known."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from nanstop.records import Atom, Report
from nanstop.records.line_forms import BETWEEN_POLES, FORMS, NUMBERED, OFF_ZERO, form_of, is_bounded
from nanstop.records.remedies import sample_of
from nanstop.rewrite.arguments import Settings, comes_back, literal
from nanstop.rewrite.forms.form_code import finite_call
from nanstop.rewrite.island import island_lines
from nanstop.rewrite.rates import is_of_a_schedule

_STABLE: Mapping[str, str] = {
    "log": "compute this logarithm from what is before the exp, softmax or sigmoid: "
    "`log_softmax`, `logsigmoid`, `logsumexp`",
    "div": "divide in log space: `torch.exp(a - b)` of the two logarithms",
    "binary_cross_entropy": "use `binary_cross_entropy_with_logits` on what is before the sigmoid",
    "prod": "add logarithms in place of multiplying probabilities",
    "exp": "keep the logarithm, and take `exp` of a difference of logarithms only",
    "matmul": "keep logarithms from round to round: in place of `c / (a @ b)` "
    "`log_c - torch.logsumexp(log_a + log_b, dim=-1)`, of a vector b; take `exp` of their sum "
    "where it is used",
}
_PRODUCTS = frozenset({"matmul", "mm", "mv", "bmm", "dot"})
_GUARDED: Mapping[str, str] = {
    "div": "keep the divisor from 0: `divisor.clamp(min=1)` of a count, "
    "`divisor.masked_fill(divisor == 0, 1)` else",
    "log": "keep what is under the logarithm from 0: `.clamp(min=torch.finfo(x.dtype).tiny)`",
    "sqrt": "keep what is under the root from 0: `.clamp(min=torch.finfo(x.dtype).tiny)`",
    "pow": "keep the base above 0: `.clamp(min=torch.finfo(x.dtype).tiny)`",
    "softmax": "fill the rows of which all is masked with 0 before and after the softmax",
    "mean": "take the sum over `max(count, 1)` in place of the mean of a selection",
    "std": "take `correction=min(1, count - 1)`: the deviation of one value is 0 then",
    "atan2": "keep its two numbers from being 0 at once: `torch.atan2(y, "
    "x.masked_fill((y == 0) & (x == 0), 1))`",
    "acosh": "keep what it reads above 1: `.clamp(min=1 + 1.2e-7)`",
    "acos": "clamp what it reads to within -1 + 1.2e-7 and 1 - 1.2e-7",
    "nll_loss_forward": 'take `reduction="sum"` over the number of labels, at least 1',
    "_ctc_loss": "pass `zero_infinity=True`; where transformers computes the loss, "
    "`model.config.ctc_zero_infinity = True` before the training",
    "where": "choose before the function, too: `f(torch.where(condition, x, 1))`",
}
_BOUNDED: Mapping[str, str] = {
    "exp": "clamp the argument of the exponential: `.clamp(max=20)`",
    **dict.fromkeys(
        ("log", "log2", "log10"),
        "keep what is under the logarithm from 0: `.clamp(min=1e-8)`",
    ),
    **{
        name: f"keep what it reads between its poles: `.clamp({low} + 1e-6, {high} - 1e-6)`"
        for name, (low, high) in BETWEEN_POLES.items()
    },
}
_OFF_ZERO = (
    "have a small number in place of 0 in what it divides by, before all that reads that: "
    "`x = x.masked_fill(x == 0, 1e-6)`"
)
_ALIASES: Mapping[str, str] = {
    "true_divide": "div",
    "_cudnn_ctc_loss": "_ctc_loss",
    "_foreach_div": "div",
    "rsqrt": "sqrt",
    "_softmax": "softmax",
    "_safe_softmax": "softmax",
    "log_softmax": "softmax",
    "_log_softmax": "softmax",
    "asin": "acos",
    "log2": "log",
    "log10": "log",
    "log1p": "log",
    "xlogy": "log",
    "nll_loss2d_forward": "nll_loss_forward",
    "var": "std",
    "std_mean": "std",
    "var_mean": "std",
}


def said(
    atom: Atom,
    report: Report,
    settings: Settings | None = None,
    islands: tuple[Atom, ...] = (),
) -> str:
    """Return what to type for a remedy whose change of the code is not known."""
    device = report.incident.facts.device.partition(":")[0]
    if islands:
        code = "\n".join(island_lines(islands, "model", device))
        return f"after the model is made:\n{code}"
    if atom.remedy == "fp32_logits":
        head = Atom(remedy="island", value="float32")
        code = "\n".join(island_lines((head,), "model.get_output_embeddings()", device))
        return f"after the model is made:\n{code}"
    if atom.remedy == "held_fill":
        return f"{atom.target}: fill with `torch.finfo(x.dtype).min`"
    if atom.remedy == "fp32_line":
        return (
            f"{atom.target}: call `.float()` on what it reads, and compute it under "
            f'`torch.autocast("{device}", enabled=False)` where autocast is on'
        )
    if atom.remedy in NUMBERED or atom.remedy in FORMS:
        return _number(atom) if atom.remedy in NUMBERED else _form(atom, report)
    if settings:
        return _settings(settings, report)
    if atom.remedy == "lr" and is_of_a_schedule(report):
        return _of_schedule(atom, report)
    restored = comes_back(report.incident.facts) and atom.remedy == "optimizer_swap"
    other = "without_its_state" if restored else atom.remedy
    return _OTHERS.get(other, "`{atom}`: no change of the code is known").format(
        atom=atom, target=atom.target, value=atom.value, sample=sample_of(atom.target)
    )


def behind_islands(atoms: tuple[Atom, ...], report: Report) -> tuple[str, ...]:
    """Return what else the code of islands needs outside of the step that they were proven on: half
    weights behind one that emits float32 raise there without an autocast.
    """
    facts, proof = report.incident.facts, report.proof
    cure = proof.minimal if proof is not None else ()
    narrow = {group.dtype for group in facts.param_groups} & {"float16", "bfloat16"}
    is_met = facts.autocast is not None or any(one.remedy == "outer_autocast" for one in cure)
    if is_met or not narrow or atoms[0].value != "float32":
        return ()
    device = facts.device.partition(":")[0]
    autocast = f'`torch.autocast("{device}", dtype=torch.{min(narrow)})`'
    when = "where the model generates, or is evaluated, and torch says that formats differ"
    return (f"{when}: {autocast} around it",)


def untyped(atom: Atom) -> str:
    """Return what is said of a form whose code does something else on the failing step."""
    return f"{atom.target}: no code is known that gives there what the cure gives"


def _number(atom: Atom) -> str:
    number, name = form_of(atom)
    if atom.remedy == "memory_fill":
        return f"{atom.target}: write all that is read of its result, or have {number} there"
    if atom.remedy == "finite_constant":
        return f"{atom.target}: read `{name}{finite_call(number)}`"
    return (
        f"{atom.target}: have {number}, or its opposite, in place of the infinity; where a library "
        "makes it of a mask of True and False, give it numbers as the mask: 0 where a place is "
        f"seen, -{number} where it is hidden"
    )


def _form(atom: Atom, report: Report) -> str:
    event = report.localization.first_bad if report.localization is not None else None
    parts = (event.forward_op or event.op).split(".") if event is not None else [""]
    name = parts[min(1, len(parts) - 1)].rstrip("_").removeprefix("special_")
    source = event.source if event is not None else None
    is_here = source is not None and atom.target == f"{source.file}:{source.line}"
    name = name if is_here else form_of(atom)[1] or name  # another line of the cure has its own
    table = _STABLE if atom.remedy == "stable_form" else _GUARDED
    line = source.text.strip() if is_here and source is not None else ""
    name = "matmul" if table is _STABLE and _multiplies_matrices(line) else name
    text = table.get(name) or table.get(_ALIASES.get(name, ""))
    text = _BOUNDED.get(name, text) if is_bounded((atom,)) else text
    text = _OFF_ZERO if form_of(atom)[0] in OFF_ZERO else text
    if text is None:
        return untyped(atom)
    return f"{atom.target}: {f'`{line}`: ' if line else ''}{text}"


def _multiplies_matrices(line: str) -> bool:
    try:
        nodes = [*ast.walk(ast.parse(line))]
    except (SyntaxError, ValueError):  # a part of a statement
        return False
    called = (node.func for node in nodes if isinstance(node, ast.Call))
    named = (func.attr for func in called if isinstance(func, ast.Attribute))
    return any(isinstance(node, ast.MatMult) for node in nodes) or any(
        name in _PRODUCTS for name in named
    )


def _of_schedule(atom: Atom, report: Report) -> str:
    made = report.incident.facts.schedule_at
    where = made.short if made is not None else "where the schedule is made"
    return (
        f"{where}: multiply each rate that this schedule is given by {atom.value}: the optimizer's "
        "own is not what the rate comes to"
    )


def _settings(settings: Settings, report: Report) -> str:
    command = report.incident.environment.command
    options = command.options if command is not None else ()
    shown = {key: value for key, value in settings.items() if value is not False}
    off = [key for key, value in settings.items() if value is False]
    known = [f"--{key}" in options for key in (*shown, *off)]
    if "attn_implementation" in settings or "dtype" in settings:
        pairs = ", ".join(f"{key}={literal(value)}" for key, value in shown.items())
        loading = f"where the model is loaded: `from_pretrained(..., {pairs})`"
        return f"{loading}, or on the command line `{_flags(settings)}`" if options else loading
    if options and (any(known) or command is None or command.script is None):
        return f"on the command line: `{_flags(settings)}`"
    pairs = ", ".join(f"{key}={literal(value)}" for key, value in settings.items())
    return f"in the arguments of the training: `{pairs}`"


def _flags(settings: Settings) -> str:
    return " ".join(f"--{key} {str(value).lower()}" for key, value in settings.items())


_OTHERS: Mapping[str, str] = {
    "drop_sample": "leave {sample} out where the data is loaded "
    "(`dataset.filter(...)`, or `dataset.select(...)` without its row), or mend it there",
    "drop_micro": "leave the samples of micro-batch {target} out where the data is loaded, or mend "
    "them there",
    "init_rows": "after the model is loaded, under `torch.no_grad()`: "
    '`w = model.get_parameter("{target}"); w[rows] = w[others].mean(0)`; rows: {value}',
    "outer_autocast": "call the model under `torch.autocast(device_type, dtype=torch.{value})`",
    "fp32_optimizer_state": "train float32 weights under autocast (load the model without "
    "`dtype`, set `bf16=True` or `fp16=True`): the optimizer's state is float32 then",
    "fp32_trainables": "load the model in float32 and compute under autocast (`bf16=True` or "
    "`fp16=True`); of adapters alone: `p.data = p.data.float()` for each `p.requires_grad`",
    "loss_scale": "multiply the loss scale by {value}: `torch.amp.GradScaler(init_scale=...)`",
    "bf16": "put `torch.bfloat16` in the place of `torch.float16`, and `bf16=True` of `fp16=True`",
    "unscale": "take the factor {value} off the loss, or divide by it before `optimizer.step()`: "
    "`for p in model.parameters(): p.grad /= {value}`",
    "clip": "before `optimizer.step()`: "
    "`torch.nn.utils.clip_grad_norm_(model.parameters(), {value})`",
    "lr": "multiply the learning rate by {value}",
    "weight_decay": "give the optimizer `weight_decay={value}`",
    "optimizer_eps": "give the optimizer `eps={value}`",
    "optimizer_swap": "train with `torch.optim.AdamW` on float32 weights",
    "without_its_state": "take over the weights of the checkpoint, not the state of its optimizer: "
    "load them with `from_pretrained(CHECKPOINT)` and train without `resume_from_checkpoint`, in a "
    "loop without `optimizer.load_state_dict(...)`; or resume from an earlier checkpoint",
    "sdpa_kernel": "before the first step: `torch.backends.cuda.enable_{value}_sdp(False)`",
    "eager": "take `torch.compile` off, or put `@torch.compiler.disable` on the function that "
    "fails",
    "attention": 'load the model with `attn_implementation="{value}"`',
}
