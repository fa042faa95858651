"""S2: Gemma with QLoRA, new tokens and a paged 8-bit optimizer (PEFT issue 1715), with one of three
causes planted.

The thread named three suspects and never separated them.
Here each variant has one that is really to blame:

``half-trainables``: the adapters are stored in float16 and updated by torch's AdamW, whose eps of
    1e-8 is 0 there. The new rows are copies of trained ones, and no state is 8-bit.
``zero-rows``: the new rows are zero, and from the seventh step on every other conversation begins
    with one. A first token attends to itself alone and Gemma has no biases, so its hidden state
    stays zero through all layers, and each norm's backward multiplies by 1 / sqrt(eps) = 1000:
    seventeen norms give 1e51, which no format holds, float32 included. The adapters are float32,
    and too small for the 8-bit optimizer to keep 8-bit state of them.
``8bit-optimizer``: the map of the 8-bit second moment is displaced, so that small ones come back
    negative and their square root is NaN (bitsandbytes 0.36 to 0.40 shipped a wrongly built map,
    issue 227, with the same symptom). The adapters are float32, the new rows copies of trained
    ones.
"""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from torch.utils.data import SequentialSampler

from nanstop.demo import data, tiny
from nanstop.demo.half import quiet_arguments
from nanstop.demo.scenario import Setup

NEW_TOKENS = ("<note>", "<fact>", "<task>", "<done>")
FIRST_TAGGED = 24
"""From this conversation on every other one uses a new token: six batches of four before it."""
DISPLACEMENT = 1e-3


def extended_tokenizer() -> Any:
    """Return the tokenizer with four new tokens at the end of the vocabulary."""
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens(list(NEW_TOKENS), special_tokens=True)
    return tokenizer


def quantised_gemma(num_tokens: int, *, new_rows: str, compute: torch.dtype) -> Any:
    """Return a Gemma of sixteen layers loaded in NF4;
    its new rows are "zero", the "mean" or a "copy" of others.
    """
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    model: Any = tiny.gemma(num_hidden_layers=16, initializer_range=0.1)
    model.resize_token_embeddings(num_tokens, mean_resizing=False)
    with torch.no_grad():
        rows = model.get_input_embeddings().weight
        old = rows[: tiny.VOCAB]
        initial = {"zero": 0.0 * old[0], "mean": old.mean(0), "copy": old[-len(NEW_TOKENS) :]}
        rows[tiny.VOCAB :] = initial[new_rows]
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute
    )
    with TemporaryDirectory() as folder:  # quantisation happens while loading
        model.save_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=compute, quantization_config=nf4, device_map={"": "cpu"}
        )


def with_lora(model: Any, *, rank: int, half: bool) -> Any:
    """Return the model prepared as PEFT's guide says, LoRA on queries, values, embedding and
    head.
    """
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    prepared = prepare_model_for_kbit_training(
        model, gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    torch.manual_seed(0)
    targets = ["q_proj", "v_proj", "embed_tokens", "lm_head"]
    adapted = get_peft_model(
        prepared,
        LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, task_type="CAUSAL_LM"),
    )
    if half:
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.half()
    return adapted


def examples(tokenizer: Any, *, tag_first: bool) -> list[dict[str, list[int]]]:
    """Return tokenized conversations;
    the later ones hold a new token, first of all or between the two sides.
    """
    found = []
    for index, row in enumerate(data.rows("train")):
        tagged = index >= FIRST_TAGGED and index % 2
        tag = NEW_TOKENS[index // 2 % len(NEW_TOKENS)] if tagged else ""
        first, between = (tag, "") if tag_first else ("", tag)
        text = f"{first}{row['prompt']}<eos>{between}{row['chosen']}<eos>"
        found.append({"input_ids": tokenizer(text)["input_ids"]})
    return found


def build(setup: Setup) -> Any:
    """Return a transformers Trainer (SFTTrainer refuses LoRA on the head).

    The float32 reference of ``zero-rows`` starts from mean rows:
    with zero rows float32 fails in the same step.
    """
    from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

    variant = setup.variant
    tokenizer = extended_tokenizer()
    model = with_lora(
        quantised_gemma(
            len(tokenizer),
            new_rows="copy" if variant != "zero-rows" else "mean" if setup.float32 else "zero",
            compute=torch.float32 if setup.float32 else torch.bfloat16,
        ),
        rank=8 if variant == "8bit-optimizer" else 4,
        half=variant == "half-trainables" and not setup.float32,
    )
    torch_adamw = setup.float32 or variant == "half-trainables"
    trainer: Any = Trainer(
        model=model,
        args=TrainingArguments(
            **arguments(setup),
            optim="adamw_torch" if torch_adamw else "paged_adamw_8bit",
        ),
        train_dataset=cast("Any", examples(tokenizer, tag_first=variant == "zero-rows")),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    rows = trainer.train_dataset
    trainer._get_train_sampler = lambda *_: SequentialSampler(
        rows
    )  # an option since transformers 5.2
    if variant == "8bit-optimizer" and not torch_adamw:
        displace_map(trainer)
    return trainer


def arguments(setup: Setup) -> dict[str, Any]:
    """Return the published settings: lr 2e-4, clipping at 0.3, gradient checkpointing;
    data in its own order.
    """
    return quiet_arguments(
        setup,
        learning_rate=2e-4,
        max_grad_norm=0.3,
        bf16=not setup.float32,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )


def displace_map(trainer: Any) -> None:
    """Lower every entry of the map that second moments are read back with."""
    optimizer = trainer.create_optimizer()
    optimizer.fill_qmap()
    optimizer.name2qmap["udynamic"] -= DISPLACEMENT
