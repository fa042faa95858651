"""A frozen teacher in float16 overflows on one batch: in an unchanged loop, in a watched one and
in a trainer it is cured by itself, and a healthy run is left as it is.
"""

import pytest

from e2e.scripts import HEAD, run

MODELS = """
class Teacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        h = self.body(x)
        return self.last(h * h * 1e4) * 1e-4

student = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
teacher = Teacher().half().eval().requires_grad_(False)
batches = [torch.randn(8, 16) for _ in range(6)]
if BAD:
    batches[3] = batches[3] * 4

def objective(model, x):
    with torch.no_grad():
        wanted = teacher(x.half()).float()
    return (model(x) - wanted).square().mean()
"""

RAW = """
optimizer = torch.optim.AdamW(student.parameters(), 1e-3)
for x in batches:
    loss = objective(student, x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
finish(student)
"""

WATCHED = """
import nanstop
optimizer = torch.optim.AdamW(student.parameters(), 1e-3)
watch = nanstop.watch(student, optimizer)
for x in batches:
    watch.step(lambda batch: objective(student, batch), x)
    watch.update()
finish(student)
"""

TRAINER = """
from transformers import Trainer, TrainingArguments

class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = student

    def forward(self, x):
        return self.net(x)

class Distillation(Trainer):
    def compute_loss(self, model, inputs, **_):
        return objective(model, inputs["x"])

    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)

given = TrainingArguments("out", per_device_train_batch_size=8, max_steps=6, report_to=[],
    remove_unused_columns=False, use_cpu=True, save_strategy="no", learning_rate=1e-3)
rows = [{"x": row} for x in batches for row in x]
Distillation(Student(), given, train_dataset=rows,
    data_collator=lambda rows: {"x": torch.stack([row["x"] for row in rows])}).train()
finish(student)
"""

LOOPS = {"raw": RAW, "watched": WATCHED, "trainer": TRAINER}


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
def test_a_teacher_that_overflows_is_kept_in_float32(tmp_path, loop):
    (tmp_path / "script.py").write_text(HEAD + MODELS + LOOPS[loop])
    ended = run(tmp_path, "script.py", "bad")
    assert ended.code == 0, ended.err
    (row,) = ended.rows
    assert (row["code"], row["step"], row["module"]) == ("NS201", 3, "Teacher"), ended.err
    assert (row["verdict"], row["action"]) == ("proven", "redo"), ended.err
    assert "Teacher" in row["remedy"]
    assert b"finite True" in ended.out


@pytest.mark.slow
def test_a_loop_with_a_healthy_teacher_is_its_own(tmp_path):
    (tmp_path / "script.py").write_text(HEAD + MODELS + RAW)
    alone, watched = run(tmp_path, "script.py", watched=False), run(tmp_path, "script.py")
    assert (watched.code, watched.out) == (0, alone.out), watched.err
    assert watched.rows == []


IN_TRAINING = "teacher = Teacher().half().requires_grad_(False)"
DRAWS = "teacher = nn.Sequential(Teacher(), nn.Dropout(0.1)).half().requires_grad_(False)"
EVAL = "teacher = Teacher().half().eval().requires_grad_(False)"


@pytest.mark.slow
def test_a_teacher_that_is_left_in_training_is_run_again_too(tmp_path):
    script = HEAD + MODELS.replace(EVAL, IN_TRAINING) + RAW
    assert script != HEAD + MODELS + RAW
    (tmp_path / "script.py").write_text(script)
    ended = run(tmp_path, "script.py", "bad")
    (row,) = ended.rows
    assert (row["code"], row["step"], row["module"]) == ("NS201", 3, "Teacher"), ended.err
    assert b"finite True" in ended.out


@pytest.mark.slow
def test_what_a_teacher_that_draws_has_made_is_no_data(tmp_path):
    (tmp_path / "script.py").write_text(HEAD + MODELS.replace(EVAL, DRAWS) + RAW)
    ended = run(tmp_path, "script.py", "bad")
    (row,) = ended.rows
    assert (row["code"], row["step"]) == ("NS000", 3), ended.err
    assert "cannot be made again" in ended.err, ended.err


ALIKE = """
class Net(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.body, self.last, self.scale = nn.Linear(16, 16), nn.Linear(16, 16), scale

    def forward(self, x):
        h = self.body(x)
        return self.last(h * h * self.scale) / self.scale

student, teacher = Net(1.0), Net(1e4).half().eval()
optimizer = torch.optim.AdamW(student.parameters(), 1e-3)
for step in range(6):
    x = torch.randn(8, 16) * (4 if BAD and step in (0, 3) else 1)
    with torch.no_grad():
        wanted = teacher(x.half()).float()
    loss = F.mse_loss(student(x), wanted)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
finish(student)
"""


@pytest.mark.slow
def test_a_teacher_of_the_class_of_its_student_is_no_batch(tmp_path):
    (tmp_path / "script.py").write_text(HEAD + ALIKE)
    ended = run(tmp_path, "script.py", "bad")
    (row,) = ended.rows
    assert (row["code"], row["step"], row["module"]) == ("NS201", 0, "Net"), ended.err
    assert (row["verdict"], "Net" in row["remedy"]) == ("proven", True), ended.err
    assert b"finite True" in ended.out
