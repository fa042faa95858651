"""Standing facts of a trainer as records, and what its model view tells."""

import json

import pytest
import torch

import hf_cases as cases
import tiny
from nanstop.errors import NanstopError
from nanstop.hosts.trainer.facts import facts_of
from nanstop.hosts.trainer.view import HfView
from nanstop.numerics.modules import quantized_layers, repeated_blocks, tied_groups
from versions import needs

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing")


def facts(trainer):
    return facts_of(HfView(trainer), trainer)


def with_peft(folder, **settings):
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = get_peft_model(tiny.llama().to(torch.float16), config)
    args = TrainingArguments(**(tiny.training_args(folder) | settings))
    return Trainer(model=model, args=args, train_dataset=tiny.TokenRows())


def test_facts_of_a_plain_run(tmp_path):
    trainer = cases.build("trainer", tmp_path, max_grad_norm=0.0, logging_steps=3)
    session = cases.ScriptedSession("proceed")
    cases.run(trainer, session=session)
    found = session.facts
    assert (found.host, found.task, found.loss) == ("Trainer", "causal_lm", "ForCausalLM")
    assert (found.model_type, found.attention) == ("llama", "sdpa")
    assert (found.vocab, found.table_rows) == (64, 64)
    assert (found.num_micro, found.batch_shape, found.clip) == (2, (2,), None)
    assert (found.nan_inf_filter, found.logging_steps) == (True, 3)
    assert (found.world_size, found.device, found.veto) == (1, "cpu", "yes")
    assert (found.autocast, found.scaler, found.quantization, found.peft) == (None,) * 4
    assert found.optimizer.name == "AdamW"
    assert found.optimizer.eps == 1e-8
    assert found.optimizer.betas == (0.9, 0.999)
    assert found.optimizer.state_bits is None
    (group,) = found.param_groups
    assert (group.dtype, group.trainable) == ("float32", True)
    assert group.num_elements == sum(p.numel() for p in trainer.model.parameters())


def test_facts_of_an_autocast_run_with_a_scaler(tmp_path):
    trainer = cases.build("trainer", tmp_path, precision="scaler")
    session = cases.ScriptedSession("proceed")
    cases.run(trainer, session=session)
    assert (session.facts.autocast, session.facts.scaler) == ("float16", 1024.0)


def test_facts_of_a_lora_run_name_each_format_and_trainability(tmp_path):
    found = facts(with_peft(tmp_path))
    assert found.peft == "LORA"
    kinds = {(g.dtype, g.trainable): g.num_tensors for g in found.param_groups}
    # peft makes the LoRA matrices float32 and leaves modules_to_save in float16.
    assert kinds[("float32", True)] == 4
    assert kinds[("float16", True)] == 1
    assert ("float16", False) in kinds


def test_grpo_logs_zero_by_design_only_on_policy(tmp_path):
    on_policy = cases.build("grpo", tmp_path, beta=0.0, num_iterations=1)
    assert "advantages" in facts(on_policy).zero_loss_by_design
    assert facts(cases.build("grpo", tmp_path, beta=0.04)).zero_loss_by_design is None
    repeated = cases.build("grpo", tmp_path, beta=0.0, num_iterations=2)
    assert facts(repeated).zero_loss_by_design is None
    assert facts(cases.build("trainer", tmp_path)).zero_loss_by_design is None


def test_the_declared_format_is_the_checkpoints_not_the_loaded_one(tmp_path):
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    tiny.llama().to(torch.bfloat16).save_pretrained(tmp_path / "base")
    assert json.loads((tmp_path / "base" / "config.json").read_text())["dtype"] == "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float16)
    args = TrainingArguments(**tiny.training_args(tmp_path))
    found = facts(Trainer(model=model, args=args, train_dataset=tiny.TokenRows()))
    assert found.declared_dtype == "bfloat16"
    assert found.param_groups[0].dtype == "float16"


def test_token_rows_that_were_never_trained_are_found(tmp_path):
    trainer = cases.build("trainer", tmp_path)
    with torch.no_grad():
        trainer.model.model.embed_tokens.weight[[0, 60]] = 0
        trainer.model.model.embed_tokens.weight[61] *= 100
    embedding, head = facts(trainer).token_rows
    assert embedding.parameter == "model.embed_tokens.weight"
    assert embedding.zero_rows == (60,)  # row 0 is the padding row
    assert embedding.outlier_rows == (61,)
    assert (embedding.num_rows, embedding.tied, embedding.trainable) == (64, False, True)
    assert (head.zero_rows, head.outlier_rows) == ((), ())
    assert head.median_norm > 0


def test_gradient_checkpointing_is_seen(tmp_path):
    assert facts(cases.build("trainer", tmp_path, checkpointing=False)).gradient_checkpointing
    assert not facts(cases.build("trainer", tmp_path)).gradient_checkpointing


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_view_names_modules_as_the_root_does(tmp_path, wrapped):
    trainer = with_peft(tmp_path) if wrapped else cases.build("trainer", tmp_path)
    view = HfView(trainer)
    modules = dict(view.root.named_modules())
    assert isinstance(modules[view.embedding()], torch.nn.Embedding)
    assert view.head().endswith("lm_head")
    assert [modules[name].__class__.__name__ for name in repeated_blocks(view.root)] == [
        "LlamaDecoderLayer"
    ] * 2
    assert quantized_layers(view.root) == ()
    assert view.device_type == "cpu"


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_attention_kernel_can_be_switched_and_back(tmp_path, wrapped):
    trainer = with_peft(tmp_path) if wrapped else cases.build("trainer", tmp_path)
    view = HfView(trainer)
    assert view.attention() == "sdpa"
    assert view.attention_choices() == ("eager",)
    ids = torch.arange(3, 19)[None]
    view.root.eval()
    before = view.logits(ids)
    view.set_attention("eager")
    assert (view.attention(), view.attention_choices()) == ("eager", ("sdpa",))
    switched = view.logits(ids)
    view.set_attention("sdpa")
    assert torch.equal(view.logits(ids), before)
    assert torch.allclose(switched, before, atol=1e-2)


def test_a_model_without_a_switch_says_so(tmp_path):
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(**tiny.training_args(tmp_path))
    view = HfView(Trainer(model=torch.nn.Linear(2, 2), args=args, train_dataset=[]))
    assert (view.attention(), view.attention_choices(), view.head()) == (None, (), None)
    with pytest.raises(NanstopError, match="Linear has no switch"):
        view.set_attention("eager")


def test_what_cuts_pictures_into_pieces_is_no_table_of_tokens(tmp_path):
    from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = ViTConfig(**small, intermediate_size=16, image_size=8, patch_size=4)
    args = TrainingArguments(**tiny.training_args(tmp_path))
    model = ViTForImageClassification(config)
    view = HfView(Trainer(model=model, args=args, train_dataset=[]))
    assert (view.embedding(), view.head()) == (None, "classifier")


def test_tied_weights_are_one_group(tmp_path):
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(**tiny.training_args(tmp_path))
    model = tiny.llama(tie_word_embeddings=True)
    view = HfView(Trainer(model=model, args=args, train_dataset=tiny.TokenRows()))
    assert tied_groups(view.root) == (("model.embed_tokens.weight", "lm_head.weight"),)


def test_packed_layers_are_found(tmp_path):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    trainer = cases.build("trainer", tmp_path)
    packed = bitsandbytes.nn.Linear4bit(32, 32, quant_type="nf4")
    trainer.model.model.layers[1].mlp.gate_proj = packed
    view = HfView(trainer)
    assert quantized_layers(view.root) == ("model.layers.1.mlp.gate_proj",)
    assert facts(trainer).quantization == "bitsandbytes-4bit"


APART = needs("trl", "1.0", "before it DPO and KTO keep prompt and completion apart")
KINDS = [pytest.param(k, marks=[APART] if k in ("dpo", "kto") else []) for k in cases.MAKERS]


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_found_in_every_trainers_batch(tmp_path, kind):
    found = []

    def look(step, _):
        for batch in step.batches:
            ids = step.view.token_ids(batch)
            logits = step.view.logits(ids) if kind != "reward" else None
            found.append((ids, logits))

    session = cases.ScriptedSession("redo", inspect=look)
    plain = cases.run(cases.build(kind, tmp_path))
    watched = cases.run(cases.build(kind, tmp_path), session=session, fault={"bad": (2,)})
    assert plain.differences(watched) == []
    assert len(found) == 2
    for ids, logits in found:
        # DPO's and Reward's rows are chosen and rejected, GRPO's are prompt and completion
        # together.
        assert ids.dim() == 2
        assert ids.shape[0] == (4 if kind in ("dpo", "reward") else 2)
        assert int(ids.max()) < 64
        if kind != "reward":
            assert logits.shape == (*ids.shape, 64)
