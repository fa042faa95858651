"""Tokenizer and models: real classes, nothing downloaded."""

import pytest
import torch

from nanstop.demo import tiny


def test_the_tokenizer_loses_nothing_and_knows_its_marks():
    tokenizer = tiny.tokenizer()
    text = "Où est la gare? 3/4 is larger: 0.75 — 你好"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) == tiny.VOCAB
    assert tuple(tokenizer.convert_ids_to_tokens(range(len(tiny.SPECIAL)))) == tiny.SPECIAL


def test_the_chat_template_marks_both_sides():
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    shown = tiny.tokenizer().apply_chat_template(messages, tokenize=False)
    assert shown == "<user>Hi<eos><assistant>Hello<eos>"
    asked = tiny.tokenizer().apply_chat_template(
        messages[:1], tokenize=False, add_generation_prompt=True
    )
    assert asked == "<user>Hi<eos><assistant>"


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (tiny.gemma3, "Gemma3ForCausalLM"),
        (tiny.gemma, "GemmaForCausalLM"),
        (tiny.qwen2, "Qwen2ForCausalLM"),
        (tiny.qwen2_reward, "Qwen2ForSequenceClassification"),
    ],
)
def test_models_are_the_real_classes_finite_and_the_same_for_a_seed(build, name):
    ids = torch.arange(5, 21).view(2, 8)
    first, again, other = build(seed=1), build(seed=1), build(seed=2)
    with torch.no_grad():
        logits = [model(input_ids=ids).logits for model in (first, again, other)]
    assert type(first).__name__ == name
    assert logits[0].isfinite().all()
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])
