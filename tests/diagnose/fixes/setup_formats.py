"""The fixes of NS000 and NS101 to NS110: formats, and what was loaded."""

import os
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import tiny
from diagnose.evidence import evidence
from diagnose.fixes.kinds import HEALTHY, Fixes, close, sound
from versions import needs

FIXES = Fixes()
EIGHT_BIT = needs("bitsandbytes", "0.50", "8-bit optimizers on the CPU")
IDS = torch.arange(3, 11)[None]

FIXES.say("NS000", 1, "an experiment of nanstop's, not of the script's")
FIXES.say("NS000", 2, "candidates, tried by experiment; none is promised")
FIXES.test("NS000", 3, "cli/test_cli.py::test_report_diagnoses_anew")


@FIXES.cost("NS000", 2)
def candidates_are_in_the_order_that_is_said():
    from nanstop.diagnose.findings.ns000_not_established import check
    from nanstop.records import ParamGroup, Replay, RunFacts

    half = ParamGroup(dtype="float16", trainable=True, num_tensors=1, num_elements=1)
    facts = RunFacts(attention="eager", param_groups=(half,))
    again = Replay(incident="1", fidelity="bitwise", runs=3)
    found, unseen = check(evidence(facts=facts, replay=again)), check(evidence(facts=facts))
    assert found is not None
    assert unseen is not None
    assert not unseen.remedies
    names = dict.fromkeys(atoms[0].remedy for atoms in found.remedies)
    return list(names) == ["attention", "fp32_trainables", "fp32_logits", "bf16"]


def lora(model, *, casts=True, **options):
    """``casts``: half adapters to float32, as PEFT does by itself."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(**({"r": 2, "target_modules": ["q_proj"]} | options))
    return get_peft_model(model, config, autocast_adapter_dtype=casts)


def loss_of(model):
    return model(input_ids=IDS, labels=IDS).loss


def classifier(**options):
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    sizes = {"vocab_size": 12, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 1, "num_labels": 1}
    return LlamaForSequenceClassification(LlamaConfig(**(sizes | {"pad_token_id": 0} | options)))


def saved(model, folder):
    model.save_pretrained(folder)
    return folder


# NS101 - a format too narrow for the model
FIXES.remedy("NS101", 1, "bf16", fault="NS201")
FIXES.remedy("NS101", 2, "island", "mlp", "float32", fault="NS201")


@FIXES.plant("NS101", 3)
def float32(fixed):
    layer = nn.Linear(3, 3)
    with torch.autocast("cpu", torch.float16, enabled=not fixed):
        loss = layer(HEALTHY * 1e5).float().square().mean() * 1e-10
    loss.backward()
    return sound(loss, layer.weight.grad)


@FIXES.cost("NS101", 3)
@FIXES.cost("NS104", 2)
def twice_the_memory():
    return torch.float32.itemsize == 2 * torch.float16.itemsize


@FIXES.plant("NS101", 4)
def a_norm_in_the_residual_branch(fixed):
    """Branches that double what they read; in bfloat16 they leave the range later."""

    def depth(dtype, normed):
        x = HEALTHY.to(dtype).requires_grad_()
        y = x
        for layer in range(200):
            y = y + (F.rms_norm(y, (3,)) if normed else y)
            if not y.isfinite().all():
                return layer
        y.float().sum().backward()
        return 200 if sound(y, x.grad) else 0

    if not fixed:
        assert depth(torch.float16, False) == 14 < depth(torch.bfloat16, False) == 126
        return False
    return depth(torch.float16, True) == 200


# NS102 - half trainables
FIXES.remedy("NS102", 1, "fp32_trainables", fault="NS402")


@FIXES.plant("NS102", 2)
@FIXES.plant("NS111", 1)
def loaded_in_float32(fixed):
    """A step at 1e-6 in a real Trainer, computed in bfloat16."""
    from transformers import LlamaForCausalLM, Trainer, TrainingArguments

    folder = saved(tiny.llama().to(torch.bfloat16), "half")
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32 if fixed else "auto")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    options = {"max_steps": 1, "learning_rate": 1e-6, "bf16": True, "save_strategy": "no"}
    arguments = TrainingArguments(**tiny.training_args("out", **options))
    Trainer(model, arguments, train_dataset=tiny.TokenRows(8)).train()
    moved = [
        (p != before[name]).float().mean() for name, p in model.named_parameters() if p.dim() > 1
    ]
    return sound(*model.parameters()) and min(moved[1:]) > 0.9  # rows of other tokens rest


# NS103 - rows that were never trained
FIXES.remedy("NS103", 1, "init_rows", "embed.weight", "mean")
FIXES.remedy("NS103", 2, "init_rows", "embed.weight", "normal")


@FIXES.plant("NS103", 1)
def resizing_takes_the_mean(fixed):
    model = tiny.llama()
    model.resize_token_embeddings(70, mean_resizing=fixed)
    trained, new = model.model.embed_tokens.weight.detach().split([64, 6])
    mean = trained.mean(0)
    near = (new - mean).norm(dim=1) < 0.1 * trained.norm(dim=1).mean()
    return bool(near.all()) and len(new.unique(dim=0)) == 6


@FIXES.plant("NS103", 3)
def rows_are_trained_beside_adapters(fixed):
    model = lora(tiny.llama(), **({"trainable_token_indices": [5]} if fixed else {}))
    before = model.get_input_embeddings()(IDS).detach().clone()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    loss_of(model).backward()
    optimizer.step()
    moved = (model.get_input_embeddings()(IDS) - before).abs().sum(-1)[0]
    return bool(moved[2] > 0) and not moved[:2].any() and sound(moved)


@FIXES.cost("NS103", 3)
def the_rows_or_the_whole_table():
    def trained(**options):
        return sum(p.numel() for p in lora(tiny.llama(), **options).parameters() if p.requires_grad)

    rows = trained(trainable_token_indices=[5]) - trained()
    return rows == 32 and trained(modules_to_save=["embed_tokens"]) - trained() == 64 * 32


# NS104 - formats that a machine does not have
FIXES.say("NS104", 1, "another GPU")
FIXES.twin("NS104", 2)


@FIXES.plant("NS104", 3)
def a_cpu_carries_out_bfloat16(fixed):
    """``fp16=True`` on a CPU is accepted, and does nothing."""
    from transformers import Trainer, TrainingArguments

    for bf16 in (True, False) if fixed else (None,):
        formats = {"bf16": bf16} if fixed else {"bf16": False, "fp16": True}
        os.environ.pop("ACCELERATE_MIXED_PRECISION", None)  # transformers 4 leaves that of the last
        arguments = TrainingArguments(**tiny.training_args("out", max_steps=1, **formats))
        seen = []
        model = tiny.llama()
        model.model.layers[0].self_attn.q_proj.register_forward_hook(
            lambda _, __, out, seen=seen: seen.append(out.dtype)
        )
        try:
            Trainer(model, arguments, train_dataset=tiny.TokenRows(8)).train()
        except ValueError:
            return False
        wanted = torch.bfloat16 if bf16 else torch.float16 if bf16 is None else torch.float32
        if set(seen) != {wanted}:
            return False
    return sound(*model.parameters())


# NS105 - weights of nobody
FIXES.twin("NS105", 1)


@FIXES.plant("NS105", 2)
def the_head_is_saved_beside_the_adapter(fixed):
    from peft import PeftModel

    with tempfile.TemporaryDirectory() as folder:
        options = {"modules_to_save": ["score"]} if fixed else {}
        model = lora(classifier(), **options)
        head = next(m for n, m in model.named_modules() if n.endswith("score"))
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.fill_(0.5)
        model.eval()
        answer = model(IDS).logits
        model.save_pretrained(folder)
        again = PeftModel.from_pretrained(classifier(), folder).eval()
    return close(again(IDS).logits, answer)


def lacking(option, wrong):
    """Weights that the files lack when the config says ``wrong``, or what is so for None."""
    from transformers import LlamaForCausalLM

    folder = saved(tiny.llama(**option), "model")
    config = LlamaForCausalLM.config_class.from_pretrained(folder)
    for name, value in (wrong or {}).items():
        setattr(config, name, value)
    _, info = LlamaForCausalLM.from_pretrained(folder, config=config, output_loading_info=True)
    return info["missing_keys"]


@FIXES.plant("NS105", 3)
def as_many_layers_as_the_files_hold(fixed):
    return not lacking({}, None if fixed else {"num_hidden_layers": 4})


@FIXES.plant("NS105", 3)
def tied_as_the_files_are(fixed):
    return not lacking(
        {"tie_word_embeddings": True}, None if fixed else {"tie_word_embeddings": False}
    )


FIXES.say("NS105", 4, "finding out why, with NS114, whose fixes are planted")


# NS106 - a checkpoint that holds NaN
def merged(dtype, *, safe=False):
    model = lora(tiny.llama(), lora_alpha=2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.fill_(300.0)
    return model.to(dtype).merge_and_unload(safe_merge=safe)


@FIXES.plant("NS106", 2)
def a_merge_in_a_wider_format(fixed):
    formats = (torch.float32, torch.bfloat16) if fixed else (torch.float16,)
    return all(bool(p.isfinite().all()) for f in formats for p in merged(f).parameters())


@FIXES.plant("NS106", 2)
def a_safe_merge_raises(fixed):
    """Whether a broken merge is noticed."""
    try:
        merged(torch.float16, safe=fixed)
    except ValueError as error:
        return "NaNs detected" in str(error)
    return False


FIXES.say("NS106", 3, "a download")


# NS107 - packed weights
FIXES.twin("NS107", 1)


@FIXES.plant("NS107", 2)
def the_computing_format_is_the_runs(fixed):
    import bitsandbytes as bnb

    compute = torch.bfloat16 if fixed else torch.float16
    layer = bnb.nn.Linear4bit(
        768,
        1,
        bias=False,
        compute_dtype=compute,
        compress_statistics=False,  # of equal blocks is 0 to quantise: 0.48 dies of it on a CPU
        quant_type="nf4",
    )
    layer.weight.data.fill_(1.0)
    layer, x = layer.to("cpu"), torch.full((1, 768), 100.0)
    return layer(x).item() == 76800.0


@FIXES.plant("NS107", 3)
def prepared_before_the_adapters(fixed):
    """Called behind them it freezes them too."""
    from peft import prepare_model_for_kbit_training

    model = tiny.llama().to(torch.bfloat16)
    if fixed:
        model = lora(prepare_model_for_kbit_training(model))
    else:
        model = prepare_model_for_kbit_training(lora(model))
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        return False
    loss_of(model).backward()
    return sound(*(p.grad for p in trained)) and model.lm_head.weight.dtype == torch.float32


@FIXES.cost("NS107", 3)
def norms_embedding_and_head_in_float32():
    """Of Llama 3.1 8B in 4 bits with double quantisation, 4.127 bits a weight."""
    width, tokens, layers = 4096, 128256, 32
    others = layers * width * (2 * width + 2 * 1024 + 3 * 14336)
    kept = 2 * tokens * width + (2 * layers + 1) * width
    half = others * 4.127 / 8 + 2 * kept
    return round(100 * 2 * kept / half) == 37


@FIXES.cost("NS107", 1)
def adapters_are_below_1_percent():
    """Of rank 16 on each linear layer of Llama 3.1 8B."""
    pairs = [(4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096), (4096, 14336), (4096, 14336)]
    pairs += [(14336, 4096)]
    adapters = 32 * sum(16 * (read + made) for read, made in pairs)
    model = 32 * sum(read * made for read, made in pairs) + 2 * 128256 * 4096
    return 0.005 < adapters / model < 0.01


FIXES.say("NS107", 4, "another GPU")
FIXES.say("NS108", 1, "another version of a library; each row cites its own")
FIXES.say("NS108", 2, "a kernel of a GPU; each row says which")


# NS109 - a head that does not fit the task
FIXES.twin("NS109", 1)


@FIXES.plant("NS109", 1)
def a_task_or_modules_to_save(fixed):
    for options in ({"task_type": "SEQ_CLS"}, {"modules_to_save": ["score"]}) if fixed else ({},):
        model = lora(classifier(), **options)
        model(IDS).logits.sum().backward()
        head = [p.grad for n, p in model.named_parameters() if "score" in n and p.requires_grad]
        if not head or not sound(*head) or not head[0].any():
            return False
    return True


@FIXES.plant("NS109", 2)
def a_padding_token(fixed):
    model = classifier(pad_token_id=None).eval()
    if fixed:
        model.config.pad_token_id = 0
    rows = F.pad(IDS.expand(2, -1), (0, 2))
    mask = (rows != 0).long()
    try:
        score = model(rows, attention_mask=mask).logits
    except ValueError:
        return False
    return close(score[:1], model(IDS).logits)


@FIXES.plant("NS109", 3)
def the_class_of_the_task(fixed):
    from transformers import LlamaForCausalLM, LlamaForSequenceClassification

    kind = LlamaForSequenceClassification if fixed else LlamaForCausalLM
    folder = saved(classifier(), Path("scores"))
    model, info = kind.from_pretrained(folder, output_loading_info=True)
    return not info["missing_keys"] and sound(*model.parameters())


# NS110 - an eps that is 0
FIXES.remedy("NS110", 1, "fp32_trainables")


def moved_under_8_bits(**options):
    """100 steps at a rate of 1e-3 and gradients of 1e-4, in blocks that hold one of 1."""
    import bitsandbytes as bnb

    weight = nn.Parameter(torch.zeros(8192))
    optimizer = bnb.optim.AdamW8bit([weight], lr=1e-3, weight_decay=0.0, **options)
    gradient = torch.full((8192,), 1e-4)
    gradient[::256] = 1.0
    for _ in range(100):
        weight.grad = gradient.clone()
        optimizer.step()
    return weight.detach()


@FIXES.plant("NS110", 2)
@EIGHT_BIT
def state_in_32_bits(fixed):
    moved = moved_under_8_bits(**({"min_8bit_size": 10_000} if fixed else {}))
    return close(moved, torch.full((8192,), -0.1))


@FIXES.cost("NS110", 0)
@EIGHT_BIT
def eight_bits_make_small_updates_shorter():
    return 30 < 0.1 / -moved_under_8_bits()[1].item() < 40
