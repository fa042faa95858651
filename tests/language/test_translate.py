"""Text at the edge: sentences within sentences are found, and what is no sentence stays."""

import pytest

from nanstop.language.catalog import core, split
from nanstop.language.choice import VARIABLE, language
from nanstop.language.translate import translated, untranslated
from nanstop.report.text.blocks.block import Block
from nanstop.report.text.spoken import spoken

SAID = {
    "step 3": "第 3 步",
    "born here: every input was finite and so is the result in float32; float16 ends at 65504": (
        "产生于此：每个输入都是有限的，用 float32 计算的结果也是；float16 的上限为 65504"
    ),
    "sample 0 tokens 0-66; sample 1 tokens 0-62; 4 more samples": (
        "样本 0 token 0-66；样本 1 token 0-62；另外 4 个样本"
    ),
    "keep `a.b` in float32 and clip the gradient norm at 1": (
        "让 `a.b` 保持 float32 和把梯度范数裁剪到 1"
    ),
    "[proven: with it 4 of 4 runs pass, without it 4 of 4 fail; loss equal to float32]": (
        "[已证明：加上它 4/4 次运行通过，去掉它 4/4 次失败；损失等于 float32]"
    ),
    "20 steps watched, 1 incident (NS201); kept finite by: keep `a` in float32": (
        "监视了 20 步，1 个故障（NS201）；保持有限靠的是：让 `a` 保持 float32"
    ),
    "first at step 3, 3 times  the cure stays on": "首次在第 3 步，3 次  修复保持生效",
    "first at step 3  nothing changed": "首次在第 3 步  没有改变任何东西",
    "leave out sample 0 of micro-batch 0": "去掉微批次 0 的样本 0",
    "leave out samples 1 and 3 of micro-batch 0": "去掉微批次 0 的样本 1 和 3",
    "`x` float32 [9, 4]: 2 elements not finite, at rows 7, 8": (
        "`x` float32 [9, 4]：2 个元素不是有限的，位于第 7、8 行"
    ),
    "`x` float32 [9, 4]: 7 elements not finite, at rows 0, 1, 2, 3 and 2 more": (
        "`x` float32 [9, 4]：7 个元素不是有限的，位于第 0、1、2、3 行和另外 2 行"
    ),
    "the micro-batch was made of rows 25, 27 of train": "这个微批次由训练的第 25、27 行组成",
    "nothing was changed: the gradients are finite, only the loss is not: the update is applied": (
        "没有改变任何东西：梯度都是有限的，只有损失不是：应用这次更新"
    ),
    "id out of range: `input` reaches 20, the table has 20 rows, forward, step 6": (
        "编号超出范围：`input` 达到 20，表有 20 行，前向，第 6 步"
    ),
    "[isolated, not cured: with it 4 of 4 runs pass, without it 4 of 4 fail]": (
        "[已隔离，没有修好：加上它 4/4 次运行通过，去掉它 4/4 次失败]"
    ),
    "keep the trainable parameters and their optimizer state in float32 and change nothing": (
        "可训练参数及其优化器状态保持 float32 和不做任何改变"
    ),
    "did you mean `--out`? known: --out, --allow": "您是不是想用 `--out`？可用的有：--out, --allow",
    "the loss grew from 5 to 5e+29 before it": "在这之前损失从 5 增长到 5e+29",
    "the loss grew from 5 to 8 before it at a learning rate of 0.1": (
        "在这之前损失从 5 增长到 8（学习率 0.1）"
    ),
}


@pytest.mark.parametrize("text", SAID)
def test_what_is_said_in_chinese(text):
    assert translated(text, "zh") == SAID[text]
    assert translated(text, "en") == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        "loss = torch.log(p[range(n), y]).mean()",
        "x = step and model(batch, rows=3) or weights",
        "+    logits = model(x)  # the mean, and the sum",
        "Traceback (most recent call last):",
        "model.layers.2.post_feedforward_layernorm",
        "RuntimeError: probability tensor contains either `inf`, `nan` or element < 0",
        "a `tick that nobody closes, and (a bracket",
    ],
)
def test_what_is_no_sentence_of_ours_stays(text):
    assert translated(text, "zh") == text


def test_code_within_a_sentence_stays():
    said = translated("line 12 brings the bad value in: `x = a and b; step 3`", "zh")
    assert said == "第 12 行带入坏值：`x = a and b; step 3`"
    said = translated("cannot read out.json: foo(bar, baz and qux)", "zh")
    assert said == "无法读取 out.json：foo(bar, baz and qux)"


def test_lines_are_translated_each():
    assert translated("step 3\n\n  step 4", "zh") == "第 3 步\n\n  第 4 步"


def test_english_words_are_told_from_names_and_code():
    assert untranslated("权重 of the `model` in float32, NaN, --out, a.b, x=y") == [
        "of",
        "the",
        "in",
    ]


@pytest.mark.parametrize(
    ("text", "inner"),
    [
        (" (row 3 of train)", "row 3 of train"),
        ("; changes training", "changes training"),
        ("could not be looked at (why)", "could not be looked at (why)"),
        ("(a) and (b)", "(a) and (b)"),
        ("[not tried; changes training]", "not tried; changes training"),
        ("first at [3", "first at [3"),
        ("ended)", "ended"),
        ("(", ""),
        ("", ""),
    ],
)
def test_what_stands_around_a_sentence_is_no_part_of_it(text, inner):
    assert core(text) == inner


def test_values_are_parted_between_words_and_not_within_names():
    ways = set(split("3, 3 times  `a (b` stays", 2))
    assert ("3", ", 3 times  `a (b` stays") in ways
    assert ("3, 3 times", "  `a (b` stays") in ways
    assert not any("(" in second and "`a" not in second for _, second in ways)


@pytest.mark.parametrize(
    ("variables", "spoken"),
    [
        ({}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "C"}, "en"),
        ({"LANG": "de_DE.UTF-8"}, "en"),
        ({"LANG": "C.UTF-8", "LC_MESSAGES": "zh_TW.UTF-8"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", VARIABLE: "en"}, "en"),
        ({"LANG": "C", VARIABLE: "zh"}, "zh"),
        ({VARIABLE: "klingon"}, "en"),
    ],
)
def test_the_language_is_the_one_that_is_asked_for(monkeypatch, variables, spoken):
    for name in (VARIABLE, "LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert language() == spoken


def test_a_line_of_code_behind_its_place_stays_as_it_is():
    said = translated("made at a.py:8: probabilities = net(x).softmax(dim=-1)", "zh")
    assert said == "产生于 a.py:8: probabilities = net(x).softmax(dim=-1)"


def test_a_place_that_is_a_name_is_not_translated():
    blocks = [
        Block("where", "  --> ", ("mean", "train.py:3")),
        Block("where", "  --> ", ("outside any module", "train.py:3")),
    ]
    name, words = spoken(blocks, "zh")
    assert name.cells[0] == "mean"
    assert words.cells[0] == "任何模块之外"
