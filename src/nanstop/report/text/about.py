"""What every report says of the machine and of the run, by name, for those who were not there."""

from __future__ import annotations

from nanstop.records import Environment, RunFacts

_VERSIONS = ("nanstop", "python", "torch", "cuda", "cublas", "cudnn", "driver", "gpu")
Named = tuple[tuple[str, str], ...]


def about_machine(env: Environment) -> Named:
    """Return versions and devices that are known, packages last."""
    rows = [(name, getattr(env, name)) for name in _VERSIONS]
    rows += [("compute capability", env.capability), *env.packages]
    return _known(rows)


def about_run(facts: RunFacts) -> Named:
    """Return how the run is set up, as far as that is known."""
    return _known(
        [
            ("device", facts.device),
            ("processes", facts.world_size if facts.world_size > 1 else None),
            ("host", facts.host),
            ("model", facts.model_type),
            ("adapter", facts.peft),
            ("quantization", facts.quantization),
            ("attention", facts.attention),
            ("autocast", facts.autocast),
            ("activations", "computed again" if facts.gradient_checkpointing else None),
            ("optimizer", facts.optimizer.name if facts.optimizer is not None else None),
        ]
    )


def _known(rows: list[tuple[str, object]]) -> Named:
    return tuple((name, str(value)) for name, value in rows if value)
