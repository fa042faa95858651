"""What a config.json tells of the tensors that a checkpoint must hold, without the model's code.

Only what holds for every architecture is claimed: layer numbers, tied or separate heads, the two
sizes of the token table, a score head, and layers that lack what all their neighbours have. What a
config leaves to its class is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nanstop.records import KeyProblem

Shapes = Mapping[str, tuple[int, ...]]

_STACK = re.compile(
    r"^(?:(?P<prefix>.+?)\.)?(?P<kind>layers|h|blocks|layer|block)\.(?P<number>\d+)\.(?P<rest>.+)$"
)
_NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_EXTRA_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_PARTS = ("text_config", "llm_config", "language_config", "decoder")

TABLES = ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "tok_embedding")
HEADS = ("lm_head", "embed_out", "output_layer")
_SCORES = ("score", "classifier", "qa_outputs", "v_head", "regression_head", "reward_head")
_WITH_SCORE = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
_SAME_LAYERS = 3
"""So few layers, and fewer, do not show what a layer is made of."""


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config that describes the language model."""
    parts = [config[name] for name in _PARTS if isinstance(config.get(name), Mapping)]
    return parts[0] if parts else config


def tied(config: Mapping[str, Any]) -> bool | None:
    """Return whether embedding and head are one, None where the config leaves it to its class."""
    for one in (config, text_config(config)):
        found = one.get("tie_word_embeddings")
        if isinstance(found, bool):
            return found
    return None


def table_of(shapes: Shapes, names: Sequence[str]) -> str | None:
    """Return the one matrix ``...NAME.weight`` with a name of ``names``, None for none and for
    several.
    """
    found = [
        name
        for name, shape in shapes.items()
        if len(shape) == 2
        and name.endswith(".weight")
        and name.removesuffix(".weight").rsplit(".", 1)[-1] in names
    ]
    return found[0] if len(found) == 1 else None


def key_problems(shapes: Shapes, config: Mapping[str, Any]) -> tuple[KeyProblem, ...]:
    """Return what a model's config expects and the tensors contradict.

    In the order: layers, tables, heads.
    """
    if not config:
        return ()
    return (
        *_layer_numbers(shapes, config),
        *_layer_parts(shapes),
        *_table_sizes(shapes, config),
        *_heads(shapes, config),
    )


def adapter_problems(shapes: Shapes, adapter: Mapping[str, Any]) -> tuple[KeyProblem, ...]:
    """Return halves of LoRA pairs that stand alone, and modules that adapter_config.json says
    are saved and are not.
    """
    lost = [
        partner
        for name in shapes
        for one, other in (("lora_A", "lora_B"), ("lora_B", "lora_A"))
        if one in name and (partner := name.replace(one, other)) not in shapes
    ]
    saved = adapter.get("modules_to_save")
    absent = (
        [name for name in saved if not _has(shapes, (name,))] if isinstance(saved, list) else []
    )
    return (
        *(
            KeyProblem(
                kind="missing",
                name=name,
                detail="the other half of the pair is there",
                new_on_load=True,
            )
            for name in lost
        ),
        *(
            KeyProblem(
                kind="missing", name=name, detail="modules_to_save names it", new_on_load=True
            )
            for name in absent
        ),
    )


def _stacks(shapes: Shapes) -> dict[str, dict[int, set[str]]]:
    """Return stack -> layer number -> what the layer holds."""
    found: dict[str, dict[int, set[str]]] = {}
    for name in shapes:
        match = _STACK.match(name)
        if match:
            stack = ".".join(part for part in (match["prefix"], match["kind"]) if part)
            found.setdefault(stack, {}).setdefault(int(match["number"]), set()).add(match["rest"])
    return found


def _layer_numbers(shapes: Shapes, config: Mapping[str, Any]) -> Iterator[KeyProblem]:
    stacks = _stacks(shapes)
    declared = _number(text_config(config), _NUM_LAYERS)
    extra = sum(_number(text_config(config), (name,)) or 0 for name in _EXTRA_LAYERS)
    for stack, layers in stacks.items():
        known = declared if len(stacks) == 1 else None
        count = known if known is not None else max(layers) + 1
        for number in sorted(set(range(count)) - set(layers)):
            why = f"the config declares {count} layers" if known else "a layer after it is there"
            yield KeyProblem(
                kind="missing",
                name=f"{stack}.{number}",
                detail=f"no tensor of it; {why}",
                new_on_load=True,
            )
        for number in sorted(number for number in layers if number >= count + extra):
            detail = f"the config declares {count} layers"
            yield KeyProblem(kind="unexpected", name=f"{stack}.{number}", detail=detail)


def _layer_parts(shapes: Shapes) -> Iterator[KeyProblem]:
    """Yield what one layer lacks and every other has, where that layer has nothing of its own
    instead.

    First and last layers are often of another make (ModernBERT's first has no norm before
    attention).
    """
    for stack, layers in _stacks(shapes).items():
        for number, parts in layers.items():
            if number in (min(layers), max(layers)) or len(layers) <= _SAME_LAYERS:
                continue
            others = set.intersection(*(held for other, held in layers.items() if other != number))
            if parts < others:
                for lost in sorted(others - parts):
                    yield KeyProblem(
                        kind="missing",
                        name=f"{stack}.{number}.{lost}",
                        detail=f"each of the other {len(layers) - 1} layers has it",
                        new_on_load=True,
                    )


def _table_sizes(shapes: Shapes, config: Mapping[str, Any]) -> Iterator[KeyProblem]:
    """Yield sizes of the token table that the config contradicts.

    More rows than the vocabulary are padding, or tokens of another kind. A width that is some other
    size of the config is one: tables may be narrower than layers (OPT, RemBERT).
    """
    text, name = text_config(config), table_of(shapes, TABLES)
    if name is None:
        return
    rows, width = shapes[name]
    vocab, hidden = _number(text, ("vocab_size",)), _number(text, _HIDDEN)
    if vocab is not None and rows != vocab:
        detail = f"{rows} rows, and the config's vocab_size is {vocab}"
        yield KeyProblem(kind="shape", name=name, detail=detail, new_on_load=rows < vocab)
    if hidden is not None and width != hidden and width not in text.values():
        detail = f"rows of {width}, and the config's hidden size is {hidden}"
        yield KeyProblem(kind="shape", name=name, detail=detail, new_on_load=True)


def _heads(shapes: Shapes, config: Mapping[str, Any]) -> Iterator[KeyProblem]:
    names = config.get("architectures")
    architecture = str(names[0]) if isinstance(names, list) and names else ""
    table, head = table_of(shapes, TABLES), table_of(shapes, HEADS)
    if architecture.endswith(("ForCausalLM", "LMHeadModel")) and table is not None:
        if head is None and tied(config) is False and not _has(shapes, (*HEADS, "output", "head")):
            yield KeyProblem(
                kind="missing",
                name="lm_head.weight",
                detail="the config says that the head is not tied to the embedding",
                new_on_load=True,
            )
        if head is not None and shapes[head][0] != shapes[table][0]:
            detail = f"{shapes[head][0]} rows, and `{table}` has {shapes[table][0]}"
            yield KeyProblem(kind="shape", name=head, detail=detail)
    if architecture.endswith(_WITH_SCORE) and not _has(shapes, _SCORES):
        yield KeyProblem(
            kind="missing",
            name="score",
            detail=f"{architecture} has a head, and no tensor here is one",
            new_on_load=True,
        )


def _has(shapes: Shapes, modules: Sequence[str]) -> bool:
    return any(part in modules for name in shapes for part in name.split("."))


def _number(config: Mapping[str, Any], names: Sequence[str]) -> int | None:
    found = (config[name] for name in names if isinstance(config.get(name), int))
    return next((one for one in found if not isinstance(one, bool)), None)
