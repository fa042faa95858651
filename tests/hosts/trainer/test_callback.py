"""The callback is the watch, in the trainer's own convention."""

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import nanstop
import tiny
from nanstop.errors import TrainingStopped


def trainer_with(folder, *callbacks):
    args = TrainingArguments(**tiny.training_args(folder, max_steps=2))
    rows = tiny.TokenRows()
    return Trainer(model=tiny.llama(), args=args, train_dataset=rows, callbacks=list(callbacks))


def test_a_trainer_that_is_given_the_callback_is_watched(tmp_path, capfd):
    callback = nanstop.Callback(policy="skip", out=tmp_path / "out")
    trainer = trainer_with(tmp_path, callback)
    assert callback.watch is nanstop.watch(trainer)
    trainer.train()
    assert callback.watch.report().steps == 2
    assert "nanstop: 2 steps watched, nothing found\n" in capfd.readouterr().err
    assert repr(callback.watch).startswith("<Watch: 2 steps, 0 incidents, 0 findings, in ")
    callback.watch.close()


def test_one_that_comes_too_late_says_so(tmp_path, caplog):
    trainer = trainer_with(tmp_path)
    trainer.add_callback(nanstop.Callback())
    trainer.train()
    assert "not watched: give nanstop.Callback() to the trainer's constructor" in caplog.text


class Scales(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **_):
        with torch.no_grad():
            model.model.norm.weight.mul_(0.999)


class Averages(Scales):
    """Puts an average of nothing in place of a weight after its third step; has another callback
    come in while the handler goes through them.
    """

    def __init__(self, trainer_of):
        self.trainer_of = trainer_of

    def on_step_end(self, args, state, control, model=None, **_):
        if state.global_step == 1:
            self.trainer_of().add_callback(Scales())
        if state.global_step == 3:
            with torch.no_grad():
                model.lm_head.weight.div_(torch.zeros(()))


class OfAnUnreadRow(TrainerCallback):
    """Divides by 0, after one step or after each, in a row that no sample has."""

    def __init__(self, *, once):
        self.once = once

    def on_step_end(self, args, state, control, model=None, **_):
        if state.global_step == 1 or not self.once:
            with torch.no_grad():
                model.model.embed_tokens.weight[2].div_(torch.zeros(()))


@pytest.mark.parametrize("once", [False, True])
def test_a_row_that_no_batch_reads_is_found_at_the_end_and_who_wrote_to_it_is_told(tmp_path, once):
    trainer = trainer_with(
        tmp_path, OfAnUnreadRow(once=once), nanstop.Callback(out=tmp_path / "out")
    )
    trainer.args.max_steps = 4
    trainer.train()
    (report,) = nanstop.watch(trainer).incidents
    assert report.incident.bad_params == ("model.embed_tokens.weight",)
    assert [one.function for one in report.incident.written_by] == ["OfAnUnreadRow.on_step_end"]
    (diagnosis,) = report.diagnoses[:1]
    assert (diagnosis.code, diagnosis.confidence) == ("NS401", "likely")
    assert "between the update of" not in diagnosis.usual_cure
    nanstop.watch(trainer).close()


class UnitNorm(TrainerCallback):
    """Divides a gradient by its norm, which is 0 in its second update: by ``eps`` more. It writes
    to it as ``how`` says.
    """

    def __init__(self, eps=0.0, *, how="copy"):
        self.eps, self.how = eps, how

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        gradient = model.lm_head.weight.grad
        gradient.mul_(float(state.global_step != 1))
        made = gradient / (gradient.norm() + self.eps)
        if self.how == "anew":
            model.lm_head.weight.grad = made
        elif self.how == "data":
            model.lm_head.weight.grad.data.copy_(made)
        else:
            gradient.copy_(made)


class HalvedAmid(TrainerCallback):
    """Divides a gradient by 0 within the second window, between two micro-batches."""

    def on_substep_end(self, args, state, control, model=None, **_):
        model.lm_head.weight.grad.div_(float(state.global_step != 1))


@pytest.mark.parametrize(
    ("writes", "name"),
    [
        (UnitNorm(), "UnitNorm.on_pre_optimizer_step"),
        (UnitNorm(how="anew"), "UnitNorm.on_pre_optimizer_step"),
        (UnitNorm(how="data"), "UnitNorm.on_pre_optimizer_step"),
        (HalvedAmid(), "HalvedAmid.on_substep_end"),
    ],
)
@pytest.mark.parametrize("max_norm", [0.0, 1.0])
def test_an_update_whose_gradients_a_callback_breaks_is_left_out(tmp_path, writes, name, max_norm):
    trainer = trainer_with(tmp_path, writes, nanstop.Callback(out=tmp_path / "out"))
    trainer.args.max_steps, trainer.args.max_grad_norm = 4, max_norm
    trainer.args.gradient_accumulation_steps = 2
    trainer.train()
    (report,) = nanstop.watch(trainer).incidents
    incident, found = report.incident, report.diagnoses[0]
    assert (incident.at.step, incident.phase) == (1, "backward")
    assert [one.function for one in incident.rewritten_at] == [name]
    assert (found.code, found.confidence) == ("NS306", "likely")
    assert report.audit[-1].action.kind == "skip"
    assert trainer.state.global_step == 4
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    nanstop.watch(trainer).close()


def test_gradients_that_a_callback_writes_finite_numbers_to_are_no_incident(tmp_path):
    callbacks = (UnitNorm(eps=1e-8), nanstop.Callback(out=tmp_path / "out"))
    trainer = trainer_with(tmp_path, *callbacks)
    trainer.train()
    assert nanstop.watch(trainer).incidents == ()
    nanstop.watch(trainer).close()


class ByData(TrainerCallback):
    """Writes to weights through ``data`` after its third step, by what it has read there before
    where it ``holds`` that.
    """

    def __init__(self, *, holds):
        self.holds, self.held = holds, None

    def on_train_begin(self, args, state, control, model=None, **_):
        self.held = model.lm_head.weight.data

    def on_step_end(self, args, state, control, model=None, **_):
        if state.global_step == 3:
            written = self.held if self.holds else model.lm_head.weight.data
            written.view(-1)[:4].div_(torch.zeros(()))


class Reads(TrainerCallback):
    """Keeps averages of the weights, and measures them; has a model of its own evaluated, for which
    torch has other kernels where anybody may hear of its functions.
    """

    def __init__(self):
        self.averages, self.norms = None, []
        torch.manual_seed(1)
        self.judge = nn.TransformerEncoderLayer(32, 4, batch_first=True).eval()
        self.given = torch.randn(3, 7, 32)

    def on_step_end(self, args, state, control, model=None, **_):
        data = [p.data for p in model.parameters()]
        self.averages = self.averages or [one.clone() for one in data]
        for average, one in zip(self.averages, data, strict=True):
            average.data.lerp_(one, 0.5)
        self.norms.append(float(sum(one.norm() for one in data)))
        with torch.no_grad():
            self.norms += self.judge(self.given).flatten().tolist()


@pytest.mark.parametrize("holds", [False, True])
def test_the_callback_that_has_written_through_data_is_told(tmp_path, holds):
    callbacks = (Reads(), ByData(holds=holds), nanstop.Callback(out=tmp_path / "out"))
    trainer = trainer_with(tmp_path, *callbacks)
    trainer.args.max_steps = 6
    with pytest.raises(TrainingStopped):
        trainer.train()
    (report,) = nanstop.watch(trainer).incidents
    assert [one.function for one in report.incident.written_by] == ["ByData.on_step_end"]
    assert report.diagnoses[0].code == "NS401"
    nanstop.watch(trainer).close()


class Raises(Reads):
    def on_step_end(self, args, state, control, model=None, **_):
        super().on_step_end(args, state, control, model=model)
        if state.global_step == 2:
            raise KeyError("of the script's own")


def test_callbacks_that_read_weights_are_left_alone(tmp_path, monkeypatch):
    noted = []
    monkeypatch.setattr("nanstop.hosts.trainer.callbacks._Write", lambda *a: noted.append(a))
    ends, norms = [], []
    for name, own in (("plain", ()), ("watched", (nanstop.Callback(out=tmp_path / "out"),))):
        reads = Reads()
        trainer = trainer_with(tmp_path / name, reads, *own)
        trainer.args.max_steps = 4
        torch.manual_seed(0)
        trainer.train()
        ends.append([p.detach().clone() for p in trainer.model.parameters()])
        norms.append(reads.norms)
    assert not noted
    assert all(map(torch.equal, *ends))
    assert norms[0] == norms[1]
    nanstop.watch(trainer).close()


def test_a_callback_that_raises_leaves_weights_their_attribute(tmp_path):
    trainer = trainer_with(tmp_path, Raises(), nanstop.Callback(out=tmp_path / "out"))
    with pytest.raises(KeyError, match="own"):
        trainer.train()
    assert "data" not in vars(nn.Parameter)
    nanstop.watch(trainer).close()


def test_the_callback_that_has_written_to_weights_is_told(tmp_path):
    held = []
    callbacks = (Scales(), Averages(lambda: held[0]))
    trainer = trainer_with(tmp_path, *callbacks, nanstop.Callback(out=tmp_path / "out"))
    trainer.args.max_steps = 6
    held.append(trainer)
    before = trainer.callback_handler.callbacks
    with pytest.raises(TrainingStopped):
        trainer.train()
    assert trainer.callback_handler.callbacks is before
    assert type(before) is list
    assert sum(type(one) is Scales for one in before) == 2
    (report,) = nanstop.watch(trainer).incidents
    (line,) = report.incident.written_by
    assert (line.function, line.file) == ("Averages.on_step_end", __file__)
    assert line.text.startswith("def on_step_end")
    (diagnosis,) = report.diagnoses[:1]
    assert diagnosis.code == "NS401"
    assert diagnosis.source == line
    assert diagnosis.lines[1].startswith("written to by `Averages.on_step_end` (test_cal")
    assert report.incident.remade_finite == 2
    nanstop.watch(trainer).close()
    assert "call_event" not in vars(trainer.callback_handler)
