"""The table of seed scenarios: real published failures, rebuilt at toy size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from nanstop.demo.scenario import Scenario, Setup
from nanstop.errors import NanstopError, unknown


def _of(module: str) -> Callable[[Setup], Any]:
    """Return the ``build`` of a module beside this one, imported when something is built."""
    return lambda setup: import_module(f"{__package__}.{module}").build(setup)


def _play(scenario: Scenario, echo: Callable[[str], None]) -> dict[str, Any]:
    from nanstop.demo.grpo import play

    return play(scenario, echo)


_TABLE = (
    Scenario(
        name="s1-gemma3-dpo-fp16",
        title="Gemma 3, DPO with LoRA, from float32 to mixed float16 (TRL issue 3236)",
        symptom="loss 0.0, grad_norm nan and rewards nan from the first log",
        build=_of("dpo"),
        steps=24,
        symptom_steps=3,
    ),
    Scenario(
        name="s2-gemma-qlora-newtokens",
        title="Gemma, QLoRA with new tokens and a paged 8-bit optimizer (PEFT issue 1715)",
        symptom="loss falls for some steps, then NaN",
        build=_of("qlora"),
        steps=16,
        symptom_steps=9,
        allow=("init_rows", "optimizer_swap"),
        variants=(
            ("half-trainables", "trainable parameters in half precision"),
            ("zero-rows", "token rows that are zero"),
            ("8bit-optimizer", "8-bit optimizer state"),
        ),
    ),
    Scenario(
        name="s3-grpo-sigfpe",
        title="Qwen2, GRPO with bf16=True on an H20 (TRL issue 2906)",
        symptom="floating point exception, no traceback",
        play=_play,
        steps=2,
        symptom_steps=2,
    ),
    Scenario(
        name="s4-reward-half-head",
        title="Qwen2 reward model with LoRA in pure float16 (TRL issue 2367)",
        symptom="an astronomically large loss with grad_norm nan, then loss 0.0",
        build=_of("reward"),
        steps=50,
        symptom_steps=50,
    ),
    Scenario(
        name="s5-qwen2-sft-fp16",
        title="Qwen2, full fine-tuning in float16 with eager attention (Qwen3 issue 670)",
        symptom="loss 0.0 and grad_norm nan; inference with the fused kernel is fine",
        build=_of("sft"),
        steps=40,
        symptom_steps=3,
    ),
)

SCENARIOS: Mapping[str, Scenario] = {scenario.name: scenario for scenario in _TABLE}


def run_scenario(
    name: str, *, variant: str | None = None, echo: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Run a scenario, watched and not, and return what was found (``runner.run``).

    Errors: ``NanstopError`` NS001 for an unknown name or variant, and where what it trains with is
    not installed.
    """
    from nanstop.demo.runner import run, to_stderr

    if name not in SCENARIOS:
        raise unknown("scenario", name, SCENARIOS)
    scenario = SCENARIOS[name]
    if variant is not None and variant not in dict(scenario.variants):
        raise unknown("variant", variant, dict(scenario.variants))
    try:
        if scenario.play is not None:
            return scenario.play(scenario, echo or to_stderr)
        return run(scenario, variant=variant, echo=echo)
    except ImportError as error:
        raise NanstopError(
            f"{name} cannot import what it trains with: {error}",
            hint="pip install 'nanstop[train,quant]'",
        ) from error


def render(result: Mapping[str, Any]) -> str:
    """Return the result of ``run_scenario`` as lines of text."""
    if "minimal" in result:
        from nanstop.demo.grpo import render as render_result
    else:
        from nanstop.demo.runner import render as render_result

    return render_result(result)
