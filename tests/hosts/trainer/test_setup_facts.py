"""How a run was set up, read off real trainers, PEFT models, packed layers and loops;
healthy ones have no findings.
"""

import pytest
import torch
from torch import nn

import hf_cases as cases
import nanstop
import tiny
from nanstop.hosts.loop.facts import facts_of_loop
from nanstop.hosts.model.view import PlainView
from nanstop.hosts.trainer.facts import facts_of
from nanstop.hosts.trainer.view import HfView
from versions import needs

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing")


def facts(trainer):
    return facts_of(HfView(trainer), trainer)


def classifier(**settings):
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = tiny.llama().config.to_dict() | {"num_labels": 1} | settings
    return LlamaForSequenceClassification(LlamaConfig(**config))


def with_lora(model, **settings):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(**({"target_modules": ["q_proj"]} | settings)))


@pytest.mark.parametrize("kind", list(cases.MAKERS))
def test_a_healthy_trainer_is_left_in_peace(tmp_path, kind):
    assert nanstop.check(cases.build(kind, tmp_path)) == ()


def test_options_of_a_trainer(tmp_path):
    found = facts(
        cases.build("dpo", tmp_path, beta=0.3, warmup_steps=2, lr_scheduler_type="cosine")
    )
    assert (found.objective.method, found.objective.beta) == ("dpo", 0.3)
    assert (found.schedule.scheduler, found.schedule.warmup_steps) == ("cosine", 2)
    assert (found.schedule.num_steps, found.schedule.micros_per_epoch) == (5, 20)
    assert found.precision.requested is None
    # The optimizer that train() will make.
    assert (found.optimizer.name, found.optimizer.lr, found.optimizer.eps) == ("AdamW", 1e-3, 1e-8)


def test_prompts_of_grpo_count_once_for_each_generation(tmp_path):
    found = facts(cases.build("grpo", tmp_path, max_steps=-1, num_train_epochs=1))
    assert found.objective.num_generations == 2
    assert found.schedule.micros_per_epoch == 40 * 2 * 2 / 2
    assert found.schedule.num_steps == 40


def test_answers_that_are_generated_and_not_compared_are_no_group(tmp_path):
    trainer = cases.build("sft", tmp_path)
    trainer.args.num_generations, trainer.args.beta = 1, 0.0  # as distillation has them
    found = facts(trainer)
    assert (found.objective.num_generations, found.objective.beta) == (None, 0.0)
    assert found.zero_loss_by_design is None
    assert nanstop.check(trainer) == ()


@pytest.mark.parametrize(
    ("settings", "codes"),
    [
        ({"task_type": "SEQ_CLS"}, []),
        ({"modules_to_save": ["score"]}, []),
        ({"task_type": "FEATURE_EXTRACTION"}, ["NS109"]),
        ({}, ["NS109"]),
    ],
)
def test_a_head_that_peft_freezes(settings, codes):
    model = with_lora(classifier(), **settings)
    assert [one.code for one in nanstop.check(model)] == codes


def test_a_classifier_without_a_padding_token(tmp_path):
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(**tiny.training_args(tmp_path))
    model = classifier(pad_token_id=None)
    trainer = Trainer(model=model, args=args, train_dataset=tiny.TokenRows())
    assert [one.code for one in nanstop.check(trainer, static=True)] == ["NS109"]
    told = Trainer(
        model=model, args=args, train_dataset=tiny.TokenRows(), processing_class=tiny.tokenizer()
    )
    assert nanstop.check(told, static=True) == ()


def packed_model(**config):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = tiny.llama()
    for layer in model.model.layers:
        packed = bitsandbytes.nn.Linear4bit(32, 32, bias=False, **config)
        packed.weight = bitsandbytes.nn.Params4bit(layer.self_attn.q_proj.weight.data)
        layer.self_attn.q_proj = packed.requires_grad_(False)
    return model


def test_a_packed_base_needs_adapters():
    model = packed_model(compute_dtype=torch.bfloat16)
    (found,) = nanstop.check(model)
    assert (found.code, found.confidence) == ("NS107", "certain")
    assert "2 4-bit layers take no update" in found.cause
    adapted = with_lora(model, target_modules=["v_proj"])
    assert nanstop.check(adapted) == ()
    known = facts_of_loop(PlainView(adapted)).quantized
    assert (known.bits, known.num_layers, known.compute_dtype) == (4, 2, "bfloat16")
    assert (known.half_rest, known.trained_base, known.num_adapted) == (None, (), 4)


def test_a_head_alone_on_a_packed_base_is_sound():
    model = packed_model().requires_grad_(False)
    model.lm_head.requires_grad_(True)
    assert nanstop.check(model) == ()


def checkpointed(*, reentrant, frozen=True):
    model = tiny.llama()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.disable_input_require_grads()
    model.model.embed_tokens.requires_grad_(not frozen)
    return model


@needs("transformers", "5.0", "has the hook of gradients of inputs from the start")
def test_frozen_embeddings_under_reentrant_checkpointing():
    (found,) = nanstop.check(checkpointed(reentrant=True))
    assert (found.code, found.confidence) == ("NS114", "likely")
    assert nanstop.check(checkpointed(reentrant=False)) == ()
    assert nanstop.check(checkpointed(reentrant=True, frozen=False)) == ()
    helped = checkpointed(reentrant=True)
    helped.enable_input_require_grads()
    assert nanstop.check(helped) == ()


def test_nothing_trainable():
    (found,) = nanstop.check(nn.Linear(2, 2).requires_grad_(False))
    assert (found.code, found.title) == ("NS114", "nothing is trainable")


def test_a_loss_that_leads_nowhere_is_seen_by_the_probe(tmp_path):
    from transformers import Trainer, TrainingArguments

    class Detached(Trainer):
        def compute_loss(self, model, inputs, **_):
            return model(**inputs).loss.detach()

    args = TrainingArguments(**tiny.training_args(tmp_path))
    trainer = Detached(model=tiny.llama(), args=args, train_dataset=tiny.TokenRows())
    assert nanstop.check(trainer, static=True) == ()
    (found,) = nanstop.check(trainer)
    assert (found.code, found.title) == ("NS114", "no gradient arrives")


def test_new_tokens_that_are_the_mean_of_the_others_are_initialised():
    model = tiny.llama()
    model.resize_token_embeddings(70)
    assert nanstop.check(model) == ()
    with torch.no_grad():
        model.get_input_embeddings().weight[66] *= 1e-3
    assert [one.code for one in nanstop.check(model)] == ["NS103"]


def test_a_padding_row_that_no_config_names_is_zero_by_design():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(64, 8, padding_idx=0)
            self.head = nn.Linear(8, 2)

    model = Encoder()
    assert nanstop.check(model) == ()
    with torch.no_grad():
        model.table.weight[7] = 0
    assert [one.code for one in nanstop.check(model)] == ["NS103"]
