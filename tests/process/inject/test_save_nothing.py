"""No writer that a script may have bound before writes anything under a verb that promises to
save nothing.
"""

import subprocess
import sys
from pathlib import Path

import pytest

import tiny
from nanstop.hosts.patch_table import Table
from nanstop.process.inject.save_nothing import save_nothing
from process_writers import write_all, written

HEAD = f"""
import sys, warnings
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
import tiny, torch, process_writers
torch.set_num_threads(1)
"""
TRAINER = f"""{HEAD}
from transformers import Trainer, TrainerCallback, TrainingArguments

class Saving(TrainerCallback):
    def save(self, args, state, control, **about):
        process_writers.write_all(about["model"], "written", trainer)

    on_train_begin = on_step_begin = on_step_end = on_log = on_train_end = save

args = TrainingArguments(**tiny.training_args("written/out"))
trainer = Trainer(model=tiny.llama(), args=args, train_dataset=tiny.TokenRows())
trainer.add_callback(Saving())
trainer.train()
trainer.save_model("written/final")
"""
LOOP = f"""{HEAD}
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
for step in range(60):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(net(torch.randn(8, 4)), torch.randn(8, 1)).backward()
    optimizer.step()
    process_writers.write_all(net, "written")
process_writers.write_all(net, "written")
"""


@pytest.mark.filterwarnings(
    "ignore:.*deprecated",
    "ignore:torch.distributed is disabled",
    "ignore:torch.distributed is unavailable",
)
def test_no_writer_writes(tmp_path):
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(**tiny.training_args(tmp_path / "out"))
    trainer = Trainer(model=tiny.llama(), args=args, train_dataset=tiny.TokenRows())
    trainer.create_optimizer_and_scheduler(2)
    table = Table()
    save_nothing(table, trainer)
    try:
        write_all(trainer.model, tmp_path, trainer)
    finally:
        table.undo()
    assert written(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["check", "doctor", "plan", "lr-range"])
@pytest.mark.parametrize("source", [TRAINER, LOOP], ids=["trainer", "loop"])
def test_a_verb_keeps_its_promise(tmp_path, verb, source):
    (tmp_path / "train.py").write_text(source)
    out = ["-o", "plan.yaml"] if verb == "plan" else []
    command = [sys.executable, "-m", "nanstop", verb, *out, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    assert written(tmp_path / "written") == [], done.stdout + done.stderr
