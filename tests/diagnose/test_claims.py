"""What the pages say of libraries is so in the installed ones;
what is newer than the oldest carries its version.

Each row: the page, words that stand on it, the version since which they are true (or were seen),
and the experiment.
"""

import inspect
import re
import warnings
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from nanstop.diagnose import pages
from versions import older_than

TINY = {
    "vocab_size": 9,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
}


def source(module):
    """The text of a module that is not imported: TRL takes seconds to."""
    return (
        Path(find_spec(module.partition(".")[0]).origin)
        .parent.joinpath(*module.split(".")[1:])
        .with_suffix(".py")
        .read_text(encoding="utf-8")
    )


def default(module, field):
    """The default of a field of TrainingArguments or of one of TRL's configs."""
    return next(one.default for one in module.__dataclass_fields__.values() if one.name == field)


def arguments(**options):
    from transformers import TrainingArguments

    return TrainingArguments(output_dir="out", use_cpu=True, report_to=[], **options)


def llama(kind, **options):
    import transformers

    torch.manual_seed(0)
    return getattr(transformers, f"LlamaFor{kind}")(transformers.LlamaConfig(**TINY, **options))


def optimizer_is_fused():
    return arguments().optim == "adamw_torch_fused"


def timeouts_are_as_said():
    from torch.distributed.constants import default_pg_timeout

    return arguments().ddp_timeout == 1800 and default_pg_timeout >= timedelta(minutes=10)


def checkpointing_was_renamed():
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        arguments(gradient_checkpointing=True, gradient_checkpointing_kwargs={})
    said = {str(one.message) for one in heard if one.category is FutureWarning}
    return any("Use `activation_checkpointing_kwargs` instead" in each for each in said)


def checkpointing_is_not_reentrant():
    model = llama("CausalLM")
    model.requires_grad_(False)
    model.activation_checkpointing_enable()
    used = next(
        m._gradient_checkpointing_func
        for m in model.modules()
        if hasattr(m, "_gradient_checkpointing_func")
    )
    embedded = model.get_input_embeddings()(torch.zeros(1, 1, dtype=torch.long))
    return used.keywords == {"use_reentrant": False} and embedded.requires_grad


def heads_drop_the_count():
    one = {"input_ids": torch.ones(2, 3, dtype=torch.long), "labels": torch.tensor([0, 1])}
    model = llama("SequenceClassification", pad_token_id=0).eval()
    loss = model(**one).loss
    return torch.equal(loss, model(**one, num_items_in_batch=torch.tensor(16)).loss)


def the_language_model_uses_the_count():
    ids = torch.ones(2, 3, dtype=torch.long)
    model = llama("CausalLM").eval()
    mean = model(input_ids=ids, labels=ids).loss
    shared = model(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(16)).loss
    return torch.allclose(mean * 4 / 16, shared)


def trainer_says_how_it_is_scaled():
    from transformers import Trainer

    return Trainer.loss_is_scaled_for_ga is None


def checkpoints_keep_their_format(folder):
    from transformers import AutoModelForCausalLM

    llama("CausalLM").to(torch.bfloat16).save_pretrained(folder)
    wide = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16 != wide.dtype


def bare_models_are_refused(folder):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer

    llama("CausalLM").save_pretrained(folder)
    config = BitsAndBytesConfig(load_in_4bit=True)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    with pytest.raises(ValueError, match="fine-tuning on purely quantized models"):
        Trainer(model, arguments())
    return True


def new_rows_are_means():
    model = llama("CausalLM")
    resize = inspect.signature(model.resize_token_embeddings).parameters["mean_resizing"]
    return resize.default is True


def rows_can_be_trained_alone():
    from peft import LoraConfig

    return LoraConfig(trainable_token_indices=[1]).trainable_token_indices == [1]


def heads_are_kept_for_three_tasks():
    from peft import LoraConfig, get_peft_model

    def trained(kind, task):
        config = LoraConfig(task_type=task, target_modules=["q_proj"])
        model = get_peft_model(llama(kind), config)
        return any(p.requires_grad and "lora" not in name for name, p in model.named_parameters())

    kinds = {"SEQ_CLS": "Sequence", "TOKEN_CLS": "Token", "FEATURE_EXTRACTION": "Sequence"}
    kept = {task: trained(f"{kind}Classification", task) for task, kind in kinds.items()}
    kept["QUESTION_ANS"] = trained("QuestionAnswering", "QUESTION_ANS")
    return [task for task, kept in kept.items() if not kept] == ["FEATURE_EXTRACTION"]


def ends_are_masked():
    from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"a": 0, "</s>": 1, "?": 2}, unk_token="?")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), eos_token="</s>", pad_token="</s>"
    )
    batch = DataCollatorForLanguageModeling(tokenizer, mlm=False)([{"input_ids": [0, 1]}])
    return batch["labels"].tolist() == [[0, -100]]


def four_bits_follow_autocast():
    import bitsandbytes as bnb

    layer = bnb.nn.Linear4bit(768, 1, bias=False, compute_dtype=torch.float16, quant_type="nf4")
    layer.weight.data.fill_(1.0)
    layer, x = layer.to("cpu"), torch.full((1, 768), 100.0)
    alone = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        return layer(x).item() == 76800.0 and alone.isinf().all()


def adapters_become_bfloat16():
    files = ("trl.trainer.grpo_trainer", "trl.trainer.sft_trainer", "trl.trainer.dpo_trainer")
    return all("param.data = param.data.to(torch.bfloat16)" in source(file) for file in files)


def zero_3_is_reentrant():
    return '["use_reentrant"] = True' in source("trl.trainer.grpo_trainer")


def one_generation_is_refused():
    from trl import GRPOConfig

    with pytest.raises(ValueError, match="at least 2 generations"):
        GRPOConfig(output_dir="out", use_cpu=True, bf16=False, num_generations=1)
    return True


def trl_averages_over_tokens():
    from trl import GRPOConfig

    return default(GRPOConfig, "loss_type") == "dapo"


def trl_checkpoints_and_asks_for_bfloat16():
    from trl import SFTConfig

    config = SFTConfig(output_dir="out", use_cpu=True)
    return config.bf16 and config.gradient_checkpointing


def normalise_floors():
    return inspect.signature(torch.nn.functional.normalize).parameters["eps"].default == 1e-12


def scales_begin_at_65536():
    return torch.amp.GradScaler("cpu").get_scale() == 65536.0


def logs_are_filtered():
    return arguments().logging_nan_inf_filter


CLAIMS = [
    ("NS102", "transformers' default `adamw_torch_fused`", "transformers 5", optimizer_is_fused),
    ("NS102", "transformers 5 takes the checkpoint's format", "transformers 5",
     checkpoints_keep_their_format),
    ("NS111", "transformers 5 loads a checkpoint in its own format", "transformers 5",
     checkpoints_keep_their_format),
    ("NS103", "`mean_resizing=True`", "", new_rows_are_means),
    ("NS103", "`trainable_token_indices` in LoraConfig", "", rows_can_be_trained_alone),
    ("NS107", "The Trainer of transformers refuses such a model", "", bare_models_are_refused),
    ("NS107", "(bitsandbytes 0.50)", "bitsandbytes 0.50", four_bits_follow_autocast),
    ("NS109", '`"TOKEN_CLS"` and `"QUESTION_ANS"` only', "", heads_are_kept_for_three_tasks),
    ("NS114", "a name of which transformers 5.23 warns", "transformers 5.23",
     checkpointing_was_renamed),
    ("NS114", "transformers 5.23 avoids both by itself", "transformers 5.23",
     checkpointing_is_not_reentrant),
    ("NS117", "In transformers 5.23 the heads", "transformers 5.23", heads_drop_the_count),
    ("NS117", "how many tokens the window has (`num_items_in_batch`)", "",
     the_language_model_uses_the_count),
    ("NS117", "`trainer.loss_is_scaled_for_ga = False`", "transformers 5.23",
     trainer_says_how_it_is_scaled),
    ("NS206", "1e-12, the default of `F.normalize`", "", normalise_floors),
    ("NS302", "The scale starts at 65536", "", scales_begin_at_65536),
    ("NS502", "(transformers 5.23: every label that equals the padding token)", "transformers 5.23",
     ends_are_masked),
    ("NS604", "a name of which transformers 5.23 warns", "transformers 5.23",
     checkpointing_was_renamed),
    ("NS605", "the Trainer of transformers after 30 (`ddp_timeout=1800`)", "",
     timeouts_are_as_said),
    ("NS801", "`logging_nan_inf_filter` is on by default", "", logs_are_filtered),
    ("NS102", "TRL 1.16 casts the adapters of a quantised base to bfloat16", "trl 1.16",
     adapters_become_bfloat16),
    ("NS111", "TRL 1.16 casts the adapters of a quantised base to bfloat16", "trl 1.16",
     adapters_become_bfloat16),
    ("NS114", "which TRL 1.16 forces under DeepSpeed ZeRO-3 with PEFT", "trl 1.16",
     zero_3_is_reentrant),
]  # fmt: skip

TRL_CLAIMS = [
    ("NS104", "TRL, whose configs set `bf16=True` whenever `fp16` is not", "trl 1.0",
     trl_checkpoints_and_asks_for_bfloat16),
    ("NS113", "TRL 1.16 refuses it with a ValueError", "trl 1.16", one_generation_is_refused),
    ("NS604", "TRL's configs have it on by default", "trl 1.0",
     trl_checkpoints_and_asks_for_bfloat16),
    ("NS802", "TRL's default, `dapo`", "trl 1.0", trl_averages_over_tokens),
]  # fmt: skip


def rows(claims, *marks):
    return [
        pytest.param(*claim, marks=marks, id=f"{claim[0]}-{claim[3].__name__}") for claim in claims
    ]


@pytest.mark.parametrize(
    ("code", "words", "seen", "holds"), [*rows(CLAIMS), *rows(TRL_CLAIMS, pytest.mark.slow)]
)
def test_what_a_page_says_of_a_library_is_so(code, words, seen, holds, tmp_path, monkeypatch):
    assert words in " ".join(pages.find_rule(code).page.split())
    if seen and older_than(*seen.split()):
        pytest.skip(f"said of {seen} and later")
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert holds(tmp_path) if inspect.signature(holds).parameters else holds()


def test_a_version_that_a_page_names_is_one_that_a_claim_was_seen_on():
    named = re.compile(r"\b(?:transformers|TRL|bitsandbytes|peft|PEFT) \d+\.\d+")
    for rule in pages.catalogue.CATALOGUE:
        said = {each.lower() for each in named.findall(" ".join(rule.page.split()))}
        held = {seen for code, _, seen, _ in (*CLAIMS, *TRL_CLAIMS) if code == rule.code}
        assert said <= held, rule.code
