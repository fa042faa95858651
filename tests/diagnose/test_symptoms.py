"""The table of symptoms is what a real Trainer logs for the planted faults, and it is read by
words and by numbers.
"""

import pytest
import torch

from nanstop.diagnose.catalogue import CATALOGUE
from nanstop.diagnose.symptoms import FILTERED, KINDS, LOGGED, findings_that_log, kind_of
from nanstop.errors import NanstopError
from nanstop.faults.table import ZOO

ENDED = ("NS502", "NS601", "NS604", "NS605")
"""Findings whose plants end the run."""


def codes(symptom):
    return [fit.rule.code for fit in findings_that_log(symptom)]


def test_every_finding_is_in_the_table_with_words_that_are_known():
    assert set(LOGGED) == {rule.code for rule in CATALOGUE}
    for pairs in LOGGED.values():
        for pair in pairs.split():
            assert set(pair.split("/")) <= set(KINDS)


def test_what_ends_a_run_logs_nothing():
    assert codes("loss none")[:4] == ["NS601", "NS604", "NS605", "NS502"]


@pytest.mark.parametrize(
    ("symptom", "first"),
    [
        ("loss 0, grad_norm nan", ["NS201", "NS402"]),
        ("loss 0.0, grad_norm 0.0", ["NS701", "NS503"]),
        ("loss=0 , grad_norm: 0.41", ["NS802"]),
        ("loss 1.19e34, grad_norm NaN", ["NS201", "NS402"]),
        ("loss 0.69, grad_norm nan", ["NS304"]),
        ("loss 0.69, grad_norm inf", ["NS301"]),
        ("grad_norm 0", ["NS503", "NS701"]),
        ("grad_norm 3e7", ["NS404"]),
        ("loss nan, grad_norm 0", ["NS503"]),
    ],
)
def test_a_log_is_read_most_likely_first(symptom, first):
    assert codes(symptom)[: len(first)] == first


@pytest.mark.parametrize(
    ("symptom", "message"),
    [
        ("", "no symptom"),
        ("los 0", "unknown series: `los`\nhelp: did you mean `loss`"),
        ("loss", "unknown value: ``"),
        ("loss vanished", "unknown value: `vanished`"),
        ("loss 0 grad_norm nan", "unknown value: `0 grad_norm nan`"),
    ],
)
def test_words_that_are_not_known_are_named(symptom, message):
    with pytest.raises(NanstopError, match=message):
        findings_that_log(symptom)


def logged(folder, model, loss_fn, batches, optimizer=None, **options):
    """What a real Trainer logs as loss and gradient norm, as words, a pair a step."""
    from transformers import PrinterCallback, Trainer, TrainingArguments

    class OfThisLoss(Trainer):
        def compute_loss(self, model, inputs, *_, **__):
            return loss_fn(inputs)

        def _prepare_inputs(self, inputs):
            return inputs

        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(batches)

    arguments = TrainingArguments(
        **{
            "output_dir": folder,
            "per_device_train_batch_size": 1,
            "max_steps": len(batches),
            "logging_steps": 1,
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
            "use_cpu": True,
            "remove_unused_columns": False,
            "lr_scheduler_type": "constant",
            "logging_nan_inf_filter": False,
            "optim": "adamw_torch",
            **options,
        }
    )
    schedule = optimizer and torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    trainer = OfThisLoss(
        model=model,
        args=arguments,
        train_dataset=batches,
        data_collator=lambda rows: rows[0],
        optimizers=(optimizer, schedule),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return [f"{kind_of(str(row['loss']))}/{kind_of(str(float(row['grad_norm'])))}" for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("code", [code for code in ZOO if code not in ENDED])
def test_a_real_trainer_logs_what_the_table_says(code, tmp_path):
    fault = ZOO[code].fault()
    batches = list(fault.batches[:6])
    came = logged(tmp_path, fault.model, fault.loss_fn, batches, fault.optimizer)
    assert set(came) <= set(LOGGED[code].split())


def unlabelled(table):
    labels = torch.full((3,), -100)
    return torch.nn.functional.cross_entropy(table.weight[:3], labels)


def masked(table):
    scores = table(torch.zeros(1, dtype=torch.long)) + torch.full((3,), -torch.inf)
    return scores.softmax(-1).sum()


def cured_by_nothing(table):
    return (table.weight * torch.nan).sum()


def unreached(table):
    return (table.weight.detach() * torch.ones(3, requires_grad=True)).sum()


def bowl(table):
    return 6.0 * table.weight.square().sum()


def small(table):
    return (table.weight.float().square() * torch.tensor([1e-4, 1.0, 0.0])).sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "loss", "dtype", "options"),
    [
        ("NS503", unlabelled, torch.float32, {}),
        ("NS202", masked, torch.float32, {}),
        ("NS106", cured_by_nothing, torch.float32, {}),
        ("NS114", unreached, torch.float32, {}),
        (
            "NS404",
            bowl,
            torch.float32,
            {"optim": "sgd", "learning_rate": 10.0, "max_grad_norm": 0.0},
        ),
        ("NS402", small, torch.float16, {}),
    ],
)
def test_what_is_usual_comes_of_a_real_optimizer(code, loss, dtype, options, tmp_path):
    torch.manual_seed(0)
    table = torch.nn.Embedding(3, 3).to(dtype)
    batches = [{"step": step} for step in range(6)]
    came = logged(tmp_path, table, lambda _: loss(table), batches, **options)
    pairs = LOGGED[code].split()
    assert pairs[0] in came
    assert set(came) <= set(pairs)


@pytest.mark.slow
def test_the_filter_shows_what_is_not_finite_as_nothing_or_as_much(tmp_path):
    weight = torch.nn.Linear(1, 1)
    losses = [1.0, *[float("nan")] * 40]
    batches = [{"factor": factor} for factor in losses]

    def loss(inputs):
        return (weight.weight * 0.0).sum() + inputs["factor"]

    each = logged(tmp_path, weight, loss, batches[1:], logging_nan_inf_filter=True)
    assert {pair.partition("/")[0] for pair in each} == {"0"}
    (window,) = logged(
        *(tmp_path, weight, loss, [*batches, *batches[1:]][:64]),
        logging_nan_inf_filter=True,
        logging_steps=2,
        max_steps=2,
        gradient_accumulation_steps=32,
    )
    assert window.partition("/")[0] in FILTERED["nan"]
