"""What a page itself says, in English and in Chinese: its labels here, sentences by the catalog."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nanstop.errors import unknown
from nanstop.language.choice import LANGUAGES
from nanstop.language.translate import translated

CHINESE: Mapping[str, str] = {
    # headings and links
    "nanstop report": "nanstop 报告",
    "Skip to the verdict": "跳到结论",
    "On this page": "本页内容",
    "Incident": "故障",
    "Other incidents": "其他故障",
    "Incidents of other runs in this folder": "此文件夹中其他运行的故障",
    "Findings": "诊断项",
    "Findings of the run": "本次运行的诊断项",
    "Timeline": "时间线",
    "The numbers of the timeline": "时间线的数值",
    "Headroom": "余量",
    "Headroom of the layers": "各层的余量",
    "Precision plan": "精度方案",
    "Environment": "环境",
    "Audit": "动作记录",
    "What the codes mean": "各代码的含义",
    "The change to make first": "首先应做的改动",
    "The change that was written": "已写入的改动",
    "The line has another text now than when it failed": "该行现在的内容与出错时不同",
    "What to do about it": "该怎么办",
    "Why, and how it is known": "原因及其依据",
    "How values grew to the first bad operation": "数值如何增长到第一个出错的操作",
    "The last operations": "最后的若干操作",
    "Operands of the first bad operation, by exponent": "第一个出错操作的操作数（按指数）",
    "Proof": "证明",
    "Which rows": "哪些行",
    # sentences
    "Copy": "复制",
    "Copied": "已复制",
    "Selected": "已选中",
    "Or have it written": "或让它自动写入",
    "No change of code is known here. What the page of the finding says:": (
        "这里没有已知的代码改动。该诊断项的页面写道："
    ),
    "What the page of the finding says:": "该诊断项的页面写道：",
    "Numbered in the order of the run.": "按运行顺序编号。",
    "Bars: how far the largest value is on the way from 1 to the end of the format, in "
    "doublings.": "条形：最大值从 1 到格式上限走了多远（以翻倍数计）。",
    "How many values are of each power of two, and where formats end.": (
        "每个二的幂有多少个值，以及各格式的上限在哪里。"
    ),
    "What the operation read and made": "该操作的输入与输出",
    "What the micro-batch holds": "该微批次的内容",
    "What was noticed": "注意到的信号",
    "change of a file": "文件的修改",
    "what to type": "要输入的内容",
    "share of the format's range": "占格式范围的比例",
    "Doublings left between the largest output of a module and the end of {}, at the steps that "
    "were sampled.": "在采样的步上，模块最大输出距 {} 上限还有多少次翻倍。",
    "{} modules with more room are left out.": "另有 {} 个余量更大的模块未列出。",
    "Modules in the order of the forward, by step": "按前向顺序排列的模块，按步",
    "step": "步",
    "largest": "最大",
    # captions and columns
    "Versions and settings": "版本与设置",
    "Every action, with what it came to": "每个动作及其结果",
    "Runs of the failing step, in turn without and with the cure": (
        "失败步的各次运行，交替地不带和带修复"
    ),
    "Samples of the micro-batch, with their first and last bad token": (
        "微批次中的样本，及其首个和最后一个异常 token"
    ),
    "Entries of the batch": "批次的条目",
    "Signals": "信号",
    "name": "名称",
    "value": "值",
    "device": "设备",
    "host": "训练宿主",
    "adapter": "适配器",
    "attention": "注意力",
    "incident": "故障",
    "micro-batch": "微批次",
    "rank": "rank",
    "action": "动作",
    "why": "原因",
    "outcome": "结果",
    "before": "之前",
    "after": "之后",
    "sample": "样本",
    "first token": "首个 token",
    "last token": "最后的 token",
    "source": "来源",
    "of": "对象",
    "message": "信息",
    "module": "模块",
    "run": "运行",
    "loss": "损失",
    "loss to float32": "损失与 float32 之差",
    "gradient cosine": "梯度余弦",
    "seconds": "秒",
    "entry": "条目",
    "shape": "形状",
    "format": "格式",
    "smallest": "最小",
    "not finite": "非有限",
    "series": "序列",
    "values": "个数",
    "first": "首个",
    "last": "最后",
    # the live view
    "nanstop view": "nanstop 实时视图",
    "Skip to the runs": "跳到各次运行",
    "connecting": "正在连接",
    "following": "正在跟随",
    "This page needs its script: it fetches what the runs tell.": (
        "本页需要脚本：由它获取各次运行的消息。"
    ),
    "The view has ended. What is shown is the last of it.": "视图已结束。这里显示的是最后的状态。",
    "The view does not answer; trying again.": "视图没有回应；正在重试。",
    "No numbers yet. They come within seconds of a step of a watched run.": (
        "还没有数值。受监视的运行每走一步，数秒之内就会出现。"
    ),
    "Incidents": "故障",
    "The whole report": "完整报告",
    "What was found beside the failures": "除失败之外还发现了什么",
    "code": "代码",
    "what": "内容",
    "trials": "试验",
    "investigating": "正在调查",
    "training": "正在训练",
    "waiting for a run": "等待运行",
    "begun": "已开始",
    "over": "已结束",
    "failed": "已失败",
    "clean": "正常结束",
    # charts
    "Loss": "损失",
    "Gradient norm": "梯度范数",
    "Loss scale": "损失缩放",
    "Learning rate": "学习率",
    "end of fp8 e4m3": "fp8 e4m3 的上限",
    "end of fp8 e5m2": "fp8 e5m2 的上限",
    "end of fp16": "fp16 的两端",
    "end of bf16 and fp32": "bf16 与 fp32 的上限",
    "all 0": "全为 0",
    # actions
    "adopt": "采用",
    "continue": "继续",
    "observe": "旁观",
    "quarantine": "隔离样本",
    "redo": "重做",
    "rollback": "回退",
    "skip": "略过",
    "stop": "停止",
    "done": "已完成",
    # the proof
    "proven": "已证明",
    "plausible": "看来可行",
    "isolated": "已隔离",
    "none found": "未找到",
    "as it is": "原样",
    "passes": "通过",
    "fails": "失败",
    "other failure": "另一种失败",
    "not applicable": "不适用",
    "crash": "崩溃",
    "oom": "内存不足",
    "timeout": "超时",
    "what failed": "失败之处",
    "largest distance of a gradient to float32": "梯度与 float32 的最大距离",
    "healthy rows": "正常的行",
    "unchanged": "不变",
    "changed": "有变",
    "no": "否",
    "yes": "是",
    "a token sees later ones": "token 能看到其后的 token",
    "memory at its peak": "内存峰值",
}


def labels(lang: str) -> Callable[[str], str]:
    """Return what says a label or a sentence in a language; what is neither stays as it is.

    Errors: ``NanstopError`` NS001 for a language that is not in ``LANGUAGES``.
    """
    if lang not in LANGUAGES:
        raise unknown("language", lang, LANGUAGES)
    if lang == LANGUAGES[0]:
        return lambda text: text
    return lambda text: CHINESE.get(text) or translated(text, lang)
