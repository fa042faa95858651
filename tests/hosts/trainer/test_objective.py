"""What real GRPO, RLOO, DPO and KTO trainers show of rewards and policies, and that looking
changes nothing.
"""

import functools
import math
from types import SimpleNamespace

import pytest
import torch

import hf_cases as cases
import nanstop
import tiny
from nanstop.hosts.trainer.objective import (
    bad_weights_of_rewards,
    entries_at,
    reward_models,
    rewards_at,
)
from versions import needs

_watch = nanstop.watch
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing")


def policy(folder, **overrides):
    """A Qwen2 that TRL can load a reference model from."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder / "policy")
    return Qwen2ForCausalLM.from_pretrained(folder / "policy", **overrides)


def trained(kind, folder, rewards, **options):
    """Train GRPO or RLOO for five steps of four completions, watched;
    return the watch and the trainer.
    """
    import trl
    from datasets import Dataset

    overrides, sharp = options.pop("model", {}), options.pop("sharp", 1.0)
    settings = tiny.training_args(folder, max_steps=5, logging_steps=1) | {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "num_generations": 4,
        "max_completion_length": 6,
        "beta": 0.0,
    }
    model = policy(folder, **overrides)
    with torch.no_grad():  # a fresh model answers all alike, whatever is dropped
        for parameter in model.parameters():
            parameter.mul_(sharp if parameter.dim() == 2 else 1.0)
    cases.seed()
    trainer = getattr(trl, f"{kind}Trainer")(
        model=model,
        reward_funcs=rewards,
        args=getattr(trl, f"{kind}Config")(**(settings | options)),
        train_dataset=Dataset.from_dict({"prompt": [f"w{i} w3" for i in range(16)]}),
        processing_class=tiny.tokenizer(),
    )
    watch = nanstop.watch(trainer, out=folder / "out", policy="skip")
    cases.seed()
    trainer.train()
    watch.close()
    return watch, trainer


def codes(watch):
    return {finding.code: finding for finding in watch.findings}


def lengths(completions, **_):
    return [len(text.split()) + 0.1 * (len(text) % 7) for text in completions]


def constant(completions, **_):
    return [1.0 for _ in completions]


def returning(value):
    def judge(completions, **_):
        return [value if place == 1 else float(place) for place, _ in enumerate(completions)]

    return judge


def first_half(completions, **_):
    return [float(place) if place < 2 else None for place, _ in enumerate(completions)]


def second_half(completions, **_):
    return [float(place) if place >= 2 else None for place, _ in enumerate(completions)]


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_rewards_that_never_differ(tmp_path, kind):
    watch, _ = trained(kind, tmp_path, constant)
    assert codes(watch)["NS701"].confidence == "certain"
    assert "every one is 1" in codes(watch)["NS701"].cause
    assert not watch.incidents


def test_rewards_that_differ_are_no_failure_where_the_loss_is_zero(tmp_path):
    watch, trainer = trained("GRPO", tmp_path, lengths, loss_type="grpo")
    assert all(abs(log["loss"]) < 1e-5 for log in trainer.state.log_history if "loss" in log)
    assert set(codes(watch)) <= {"NS802"}
    assert not watch.incidents


class Scoring:
    kind = "of a script"

    def prepare(self, out, rewards):
        out["advantages"] = rewards - rewards.mean()
        out["seen"] = rewards
        return out

    def again(self, out):
        out["seen"] = out["advantages"]


def test_where_a_trainer_of_the_script_puts_entries():
    """Of two lines that give one name it is not known which has."""
    (found,) = entries_at(Scoring())
    assert found.function == "advantages"
    assert found.text == 'out["advantages"] = rewards - rewards.mean()'
    assert entries_at(torch.nn.Linear(1, 1)) == ()


def test_where_rewards_are_defined():
    class Scorer:
        def __call__(self, **_):
            return []

    wrapped = functools.wraps(lengths)(lambda **_: [])
    functions = [functools.partial(lengths, 1), wrapped, Scorer(), torch.nn.Linear(1, 1), len]
    names = ["a", "b", "c", "d", "e"]
    trainer = SimpleNamespace(reward_funcs=functions, reward_func_names=names)
    found = rewards_at(trainer)
    line = lengths.__code__.co_firstlineno
    assert [one.function for one in found] == ["a", "b", "c"]
    assert [one.line for one in found[:2]] == [line, line]
    assert found[2].text == "def __call__(self, **_):"
    assert rewards_at(SimpleNamespace()) == ()
    assert reward_models(trainer) == (("d", "float32"),)
    assert reward_models(SimpleNamespace()) == ()


def test_a_weight_of_a_reward_model_that_is_not_finite():
    judge, sound = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    torch.nn.init.constant_(judge.weight, torch.nan)
    functions, names = [lengths, judge, sound], ["a", "b", "c"]
    trainer = SimpleNamespace(reward_funcs=functions, reward_func_names=names)
    assert bad_weights_of_rewards(trainer) == (("b", "weight"),)
    assert bad_weights_of_rewards(SimpleNamespace()) == ()


def test_what_fails_where_a_trainer_generates_is_run_again_up_to_its_rewards(tmp_path, monkeypatch):
    asked = []

    def counted(completions, **_):
        asked.append(len(completions))
        return lengths(completions)

    made = []
    monkeypatch.setattr(nanstop, "watch", lambda *a, **k: made.append(_watch(*a, **k)) or made[0])
    with pytest.raises(RuntimeError, match="probability tensor"):
        trained("GRPO", tmp_path, counted, repetition_penalty=1e-45, max_completion_length=1)
    (told,) = made[0].incidents
    assert told.incident.phase == "generate"
    assert told.diagnoses[0].code == "NS201"
    assert told.localization.first_bad.op == "aten.div.Tensor"
    assert asked == []


def test_what_fails_in_a_reward_function_is_not_asked_for_again(tmp_path, monkeypatch):
    asked, made = [], []

    def divided(completions, **_):
        asked.append(len(completions))
        return [1 / 0 for _ in completions]

    monkeypatch.setattr(nanstop, "watch", lambda *a, **k: made.append(_watch(*a, **k)) or made[0])
    with pytest.raises(ZeroDivisionError):
        trained("GRPO", tmp_path, divided)
    assert asked == [4]
    assert [one.diagnoses[0].code for one in made[0].incidents] == ["NS000"]


def test_what_fails_to_generate_after_a_reward_function_has_failed(tmp_path, monkeypatch):
    trainers, watches = [], []

    def seen(trainer, **options):
        trainers.append(trainer)
        watches.append(_watch(trainer, **options))
        return watches[0]

    def unreachable(**_):
        raise ConnectionError("no answer")

    monkeypatch.setattr(nanstop, "watch", seen)
    with pytest.raises(ConnectionError):
        trained("GRPO", tmp_path, unreachable, max_completion_length=1)
    trainers[0].generation_config.repetition_penalty = 1e-45
    with pytest.raises(RuntimeError, match="probability tensor"):
        trainers[0].train()
    assert [one.diagnoses[0].code for one in watches[0].incidents] == ["NS201"]


class Sharpened(torch.nn.Linear):
    """Divides by a norm that is 0 where rows are asked for a gradient at ``at``."""

    at, now = 2, staticmethod(lambda: 0)

    def forward(self, rows):
        if rows.requires_grad and self.now() == self.at:
            rows = rows * 0.0
        return super().forward(rows / rows.norm(dim=-1, keepdim=True))


def trained_online(folder, reward, head=None, classes=None, **options):
    """Train online DPO for four steps of two prompts, watched, and yield the watch as soon as it
    watches.
    """
    from datasets import Dataset
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    model, reference = (policy(folder, attention_dropout=0.1) for _ in range(2))
    settings = tiny.training_args(folder, max_steps=4) | {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "max_new_tokens": 4,
    }
    trainer = OnlineDPOTrainer(
        model=model,
        ref_model=reference,
        reward_funcs=reward,
        reward_processing_classes=classes,
        args=OnlineDPOConfig(**settings),
        train_dataset=Dataset.from_dict({"prompt": [f"w{i} w3" for i in range(16)]}),
        processing_class=tiny.tokenizer(),
    )
    if head is not None:
        model.lm_head.__class__ = head
        model.lm_head.now = lambda: trainer.state.global_step
    for name, value in options.items():
        setattr(trainer.generation_config, name, value)
    watch = _watch(trainer, out=folder / "out", policy="skip")
    cases.seed()
    yield watch
    try:
        trainer.train()
    finally:
        watch.close()


INSIDE = needs("trl", "1.0", "before it this trainer is no experimental one")


@INSIDE
@pytest.mark.filterwarnings("ignore")
def test_a_trainer_that_generates_inside_its_step_is_run_again_with_what_it_made(tmp_path):
    asked = []

    def counted(prompts, completions, **_):
        asked.append(len(completions))
        return lengths(completions)

    (watch,) = trained_online(tmp_path, counted, Sharpened)
    (told,) = watch.incidents
    assert told.diagnoses[0].code == "NS206"
    assert told.proof.verdict == "proven"
    assert told.replay.fidelity == "bitwise"
    assert asked == [4] * 4


@INSIDE
@pytest.mark.filterwarnings("ignore")
def test_what_fails_to_generate_inside_a_step_is_run_again_up_to_its_rewards(tmp_path):
    asked = []
    training = trained_online(tmp_path, lambda **_: asked.append(1), repetition_penalty=1e-45)
    watch = next(training)
    with pytest.raises(RuntimeError, match="probability tensor"):
        next(training)
    (told,) = watch.incidents
    assert (told.incident.phase, told.diagnoses[0].code) == ("generate", "NS201")
    assert asked == []


@INSIDE
@pytest.mark.filterwarnings("ignore")
def test_a_reward_function_that_fails_inside_a_step_is_not_asked_again(tmp_path):
    asked = []

    def divided(completions, **_):
        asked.append(len(completions))
        return [1 / 0 for _ in completions]

    with pytest.raises(ZeroDivisionError):
        list(trained_online(tmp_path, divided))
    assert asked == [4]


@INSIDE
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("value", "word"), [(math.inf, "infinite"), (math.nan, "NaN")])
def test_rewards_that_are_summed_before_anybody_sees_them(tmp_path, value, word):
    (watch,) = trained_online(tmp_path, returning(value))
    (found,) = [one for one in watch.findings if one.code == "NS704"]
    assert word in found.cause
    assert found.source.function == "judge"


@INSIDE
@pytest.mark.filterwarnings("ignore")
def test_a_model_whose_scores_are_summed_before_anybody_sees_them(tmp_path):
    from transformers import Qwen2ForSequenceClassification

    config = policy(tmp_path).config
    config.num_labels = 1
    scorer = Qwen2ForSequenceClassification(config)
    with torch.no_grad():
        scorer.score.weight[0, 3] = math.nan
    scorer.config._name_or_path = "scorer"
    hooks = dict(scorer._forward_hooks)
    (watch,) = trained_online(tmp_path, scorer, classes=tiny.tokenizer())
    (found,) = [one for one in watch.findings if one.code == "NS704"]
    assert "100 % of the rewards" in found.cause
    assert "is a model, and its `score.weight` is not finite" in found.lines[0]
    assert dict(scorer._forward_hooks) == hooks


@needs("trl", "1.16", "the trainer is not there before it")
@pytest.mark.filterwarnings("ignore")
def test_reward_functions_without_names(tmp_path):
    from datasets import Dataset
    from trl.experimental.a2po import A2POConfig, A2POTrainer

    settings = tiny.training_args(tmp_path, max_steps=2) | {"per_device_train_batch_size": 2}
    asked = []

    def judge(completions, **_):
        asked.append(1)
        return [math.nan if len(asked) > 2 else float(len(each)) for each in completions]

    trainer = A2POTrainer(
        model=policy(tmp_path),
        reward_funcs=judge,
        args=A2POConfig(**settings, max_completion_length=4, num_value_samples=2),
        train_dataset=Dataset.from_dict({"prompt": [f"w{i} w3" for i in range(4)]}),
        processing_class=tiny.tokenizer(),
    )
    watch = nanstop.watch(trainer, out=tmp_path / "out", policy="skip")
    trainer.train()
    watch.close()
    (told, *_) = watch.incidents
    assert told.diagnoses[0].code == "NS704"
    assert told.diagnoses[0].where == "judge"


GOES_ON = needs("trl", "1.0", "before it an infinite reward is a NaN advantage")
INFINITE = pytest.param(math.inf, "infinite", marks=GOES_ON)


@pytest.mark.parametrize(("value", "word"), [INFINITE, (math.nan, "NaN"), (-3e38, "so large")])
def test_rewards_that_are_no_numbers_are_told_though_trl_goes_on(tmp_path, value, word):
    watch, trainer = trained("GRPO", tmp_path, returning(value))
    assert word in codes(watch)["NS704"].cause
    assert codes(watch)["NS704"].where == "judge"
    code = returning(value).__code__
    source = codes(watch)["NS704"].source
    assert (source.file, source.line, source.function) == (__file__, code.co_firstlineno, "judge")
    assert source.text in codes(watch)["NS704"].lines[0]
    assert "NS701" not in codes(watch)  # what follows from it is not told beside it
    assert trainer.state.global_step == 5


@pytest.mark.slow
def test_an_infinite_reward_is_the_cause_not_of_the_model_that_fails(tmp_path):
    watch, _ = trained("GRPO", tmp_path, returning(math.inf), scale_rewards="none")
    assert watch.incidents[0].diagnoses[0].code == "NS704"
    assert [s.name for s in watch.incidents[0].incident.signals if s.source == "reward"] == [
        "judge"
    ]


def test_a_completion_that_no_function_scores(tmp_path):
    watch, _ = trained("RLOO", tmp_path, returning(None))
    assert codes(watch)["NS704"].confidence == "likely"


def test_none_for_what_another_function_scores_is_how_tasks_are_routed(tmp_path):
    watch, _ = trained("GRPO", tmp_path, [first_half, second_half])
    assert not {"NS701", "NS704"} & set(codes(watch))


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_dropout_between_generating_and_training(tmp_path, kind, dropout):
    watch, _ = trained(
        kind, tmp_path, lengths, sharp=6.0, model={"attention_dropout": dropout}, num_iterations=2
    )
    assert ("NS703" in codes(watch)) == (dropout > 0)
    assert "NS702" not in codes(watch)


def test_updates_that_carry_the_policy_away_within_a_batch(tmp_path):
    watch, _ = trained(
        "GRPO",
        tmp_path,
        lengths,
        num_iterations=5,
        learning_rate=0.3,
        lr_scheduler_type="constant",
        epsilon=100.0,
        max_grad_norm=100.0,
    )
    assert codes(watch)["NS702"].confidence == "likely"
    assert "NS703" not in codes(watch)


@pytest.mark.parametrize("kind", ["dpo", "kto", "grpo", "rloo"])
def test_watching_changes_nothing_and_finds_nothing(tmp_path, kind):
    settings = {"max_steps": 4, "logging_steps": 1}
    plain = cases.build(kind, tmp_path / "plain", **settings)
    cases.seed()
    plain.train()
    trainer = cases.build(kind, tmp_path / "watched", **settings)
    watch = nanstop.watch(trainer, out=tmp_path / "out")
    functions = getattr(trainer, "reward_funcs", None)
    cases.seed()
    trainer.train()
    watch.close()
    assert cases.result(plain).differences(cases.result(trainer)) == []
    assert getattr(trainer, "reward_funcs", None) is functions
    assert set(codes(watch)) == set()


@pytest.mark.parametrize(
    ("kind", "metric"), [("dpo", "rewards/margins"), ("kto", "kl"), ("rloo", "reward_std")]
)
def test_logs_are_handed_on(tmp_path, kind, metric):
    session = cases.ScriptedSession("proceed")
    cases.run(cases.build(kind, tmp_path, max_steps=3, logging_steps=1), session=session)
    assert [step for step, entry in session.series.logged if metric in entry] == [1, 2, 3]


def test_ratios_are_noted_before_the_first_update_and_after_it(tmp_path):
    session = cases.ScriptedSession("proceed")
    trainer = cases.build("grpo", tmp_path, max_steps=4, logging_steps=1)
    cases.run(trainer, session=session)
    noted = [
        (name, step) for name, step, _ in session.series.values if name.startswith("log_ratio")
    ]
    assert {name for name, step in noted if step in (0, 2)} == {"log_ratio/at_once"}
    assert {name for name, step in noted if step in (1, 3)} == {"log_ratio/later"}


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_why_no_group_has_rewards_that_differ(tmp_path, kind):
    def by_place(completions, **_):
        return [float(place) for place in range(len(completions))]

    weighed, _ = trained(kind, tmp_path / "a", by_place, reward_weights=[0.0])
    same, _ = trained(kind, tmp_path / "b", lengths, top_k=1)
    by_hand, _ = trained(kind, tmp_path / "c", lambda completions, **_: [0.0] * len(completions))
    assert codes(weighed)["NS701"].title == "rewards differ, and weigh nothing"
    assert "the answers of each group are the same, too" in codes(same)["NS701"].lines[-1]
    assert codes(by_hand)["NS701"].lines[-1] == "call the reward function by hand"
