"""Silent failures in real scripts under ``nanstop run``: each is among the findings, its healthy
twin has none.
"""

import pytest

from e2e.scripts import run

HEAD = """
import sys, torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

torch.set_num_threads(1)
torch.manual_seed(0)
BAD = "bad" in sys.argv
SIZES = dict(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, pad_token_id=0)

def batches(rows=2, tokens=24, steps=5):
    return [torch.randint(3, 128, (rows, tokens)) for _ in range(steps)]
"""

STAGNATION = """
from transformers import Trainer, TrainingArguments

model = Qwen2ForCausalLM(Qwen2Config(**SIZES))
if BAD:
    model = model.to(torch.bfloat16)
rows = [{"input_ids": ids, "labels": ids} for ids in batches(64, 24, 1)[0]]
args = TrainingArguments("out", max_steps=6, per_device_train_batch_size=4, learning_rate=1e-6,
                         use_cpu=True, report_to="none", save_strategy="no", bf16=not BAD)
Trainer(model=model, args=args, train_dataset=rows).train()
"""

UNDERFLOW = """
model = Qwen2ForCausalLM(Qwen2Config(**SIZES))
if BAD:
    model = model.half()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", enabled=not BAD, init_scale=2.0**20)
for ids in batches():
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16, enabled=not BAD):
        loss = model(input_ids=ids, labels=ids).loss * 1e-6
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""

LORA = """
from peft import LoraConfig, get_peft_model

kind = Qwen2ForCausalLM if ALL_FROZEN else Qwen2ForSequenceClassification
task = "CAUSAL_LM" if ALL_FROZEN else "SEQ_CLS"
config = LoraConfig(r=4, target_modules=["q_proj"], task_type=task)
model = get_peft_model(kind(Qwen2Config(**SIZES)), config)
recompute = getattr(model.base_model.model, "activation_checkpointing_enable", None)
(recompute or model.base_model.model.gradient_checkpointing_enable)({"use_reentrant": BAD})
if BAD:
    model.base_model.model.disable_input_require_grads()
model.train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
for ids in batches():
    optimizer.zero_grad()
    labels = ids if ALL_FROZEN else torch.tensor([0, 1])
    model(input_ids=ids, labels=labels).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
"""

CLIPPING = """
model = Qwen2ForCausalLM(Qwen2Config(**SIZES))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for ids in batches():
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(input_ids=ids, labels=ids).loss
    scaler.scale(loss).backward()
    if not BAD:
        scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
"""

ROPE = """
model = Qwen2ForCausalLM(Qwen2Config(**SIZES, max_position_embeddings=1024))
if BAD:
    model.model.rotary_emb.to(torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for ids in batches(1, 640, 3):
    optimizer.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
"""

POOLING = """
from transformers import Trainer, TrainingArguments

sizes = SIZES | {"pad_token_id": 5 if BAD else 0}
model = Qwen2ForSequenceClassification(Qwen2Config(**sizes, num_labels=2))
rows = []
for place in range(32):
    length = 6 + place % 10
    ids = torch.cat([torch.randint(6, 128, (length,)), torch.zeros(16 - length, dtype=torch.long)])
    mask = (torch.arange(16) < length).long()
    rows.append({"input_ids": ids, "attention_mask": mask, "labels": place % 2})
args = TrainingArguments("out", max_steps=4, per_device_train_batch_size=4, use_cpu=True,
                         report_to="none", save_strategy="no")
Trainer(model=model, args=args, train_dataset=rows).train()
"""

PAIRS = """
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for step in range(4):
    x, y = torch.randn(16, 8), torch.randn(16)
    loss = (net(x) - (y if BAD else y[:, None])).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

CASES = {
    "stagnation": ("NS111", STAGNATION),
    "underflow": ("NS303", UNDERFLOW),
    "frozen-but-the-head": ("NS114", "ALL_FROZEN = False\n" + LORA),
    "clip-before-unscale": ("NS112", CLIPPING),
    "rope-in-half": ("NS208", ROPE),
    "pooled-padding": ("NS208", POOLING),
    "every-pair": ("NS118", PAIRS),
}


def ended(folder, body, *arguments):
    (folder / "script.py").write_text(HEAD + body)
    return run(folder, "script.py", *arguments)


@pytest.mark.slow
@pytest.mark.parametrize(("code", "body"), CASES.values(), ids=CASES)
def test_silent_failure_is_among_the_findings_and_its_twin_has_none(tmp_path, code, body):
    bad = ended(tmp_path, body, "bad")
    assert (bad.code, bad.rows) == (0, []), bad.err
    assert code in {finding["code"] for finding in bad.summary["findings"]}
    good = ended(tmp_path, body)
    assert (good.code, good.rows, good.summary["findings"]) == (0, [], []), good.err


@pytest.mark.slow
def test_autograds_refusal_is_explained_and_stays_the_scripts_own(tmp_path):
    bad = ended(tmp_path, "ALL_FROZEN = True\n" + LORA, "bad")
    assert bad.code == 1
    assert "does not require grad" in bad.err
    assert [row["code"] for row in bad.rows] == ["NS114"]
    good = ended(tmp_path, "ALL_FROZEN = True\n" + LORA)
    assert (good.code, good.rows, good.summary["findings"]) == (0, [], [])
