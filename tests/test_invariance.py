"""Watching changes nothing: weights, moments, logs, counters and random state are bitwise those
of an unwatched run.
"""

import copy
import io

import pytest
import torch

import hf_cases as cases

TRAINERS = tuple(cases.MAKERS)
SMALL = [(kind, "fp32", None) for kind in TRAINERS] + [
    ("trainer", "bf16", None),
    ("trainer", "fp16", None),
    ("sft", "scaler", None),
    ("trainer", "fp32", False),
    ("dpo", "fp32", True),
]
LARGE = [
    (kind, precision, checkpointing)
    for kind in TRAINERS
    for precision in ("fp32", "bf16", "fp16", "scaler")
    for checkpointing in (None, False, True)
    if (kind, precision, checkpointing) not in SMALL
]
# TRL 1.16 uses names that transformers 5.23 has replaced.
# KTO runs a forward without gradients, of which reentrant checkpointing warns.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
]
MATRIX = SMALL + [pytest.param(*case, marks=pytest.mark.slow) for case in LARGE]


def watched_and_plain(folder, kind, precision, checkpointing, **settings):
    settings = {"precision": precision, "checkpointing": checkpointing} | settings
    plain = cases.run(cases.build(kind, folder, **settings))
    session = cases.ScriptedSession("proceed", gauge_at=3)
    watched = cases.run(cases.build(kind, folder, **settings), session=session)
    return plain, watched, session


@pytest.mark.parametrize(("kind", "precision", "checkpointing"), MATRIX)
def test_watching_changes_nothing(tmp_path, kind, precision, checkpointing):
    plain, watched, session = watched_and_plain(tmp_path, kind, precision, checkpointing)
    assert plain.differences(watched) == []
    assert session.failures == []
    assert session.completed_steps == [0, 1, 2, 3, 4]
    assert session.finished == 0
    assert len(session.looks) == 4
    assert all(session.looks)


@pytest.mark.parametrize("clip", [0.0, 1e-3])
def test_clipping_is_the_hosts_own(tmp_path, clip):
    plain, watched, _ = watched_and_plain(
        tmp_path, "trainer", "fp32", None, max_grad_norm=clip, gradient_accumulation_steps=4
    )
    assert plain.differences(watched) == []


def test_the_comparison_sees_a_single_changed_draw(tmp_path):
    plain = cases.run(cases.build("trainer", tmp_path))
    trainer = cases.build("trainer", tmp_path)
    original = trainer.training_step

    def step(*args):
        torch.rand(())
        return original(*args)

    trainer.training_step = step
    assert "rng" in plain.differences(cases.run(trainer))


def test_the_raw_losses_are_those_that_the_host_logs(tmp_path):
    session = cases.ScriptedSession("proceed")
    trainer = cases.build("trainer", tmp_path)
    cases.run(trainer, session=session)
    raw = session.series.of("loss_raw")
    logged = session.series.of("loss_logged")
    assert len(raw) == 10
    # Each micro-batch's loss is already divided by their number.
    pairs = [raw[i] + raw[i + 1] for i in range(0, 10, 2)]
    # Before transformers 5 a log has four digits behind the point.
    assert logged == pytest.approx(pairs, rel=1e-6, abs=6e-5)


def test_a_watched_model_can_be_copied_and_saved(tmp_path):
    from nanstop.hosts.trainer.watch import watch_trainer

    trainer = cases.build("trainer", tmp_path)
    plain_keys = cases.build("trainer", tmp_path)
    plain_keys.train()
    watch = watch_trainer(trainer, cases.ScriptedSession("proceed").open)
    trainer.train()
    copied = copy.deepcopy(trainer.model)
    buffer = io.BytesIO()
    torch.save(trainer.model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(weight, copied.state_dict()[name])
        assert torch.equal(weight, loaded.state_dict()[name])
    assert repr(_keys(trainer)) == repr(_keys(plain_keys))
    watch.close()


def _keys(trainer):
    state = trainer.optimizer.state_dict()
    groups = [sorted(group) for group in state["param_groups"]]
    return groups, {index: sorted(entries) for index, entries in state["state"].items()}


def test_close_restores_every_attribute(tmp_path):
    from nanstop.hosts.trainer.watch import watch_trainer

    trainer = cases.build("grpo", tmp_path)
    attributes, accelerated = set(vars(trainer)), set(vars(trainer.accelerator))
    modules = {name: dict(vars(module)) for name, module in trainer.model.named_modules()}
    watch = watch_trainer(trainer, cases.ScriptedSession("proceed").open)
    watch.patches.set(trainer.accelerator, "clip_grad_norm_", None)
    assert {name: dict(vars(m)) for name, m in trainer.model.named_modules()} == modules
    watch.close()
    watch.close()
    assert set(vars(trainer)) == attributes
    assert set(vars(trainer.accelerator)) == accelerated
