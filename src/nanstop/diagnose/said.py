"""What people type into a search box, by the finding that it most often is.

Messages of errors as they are printed, and symptoms as they are told: in English, and behind ``|``
in Chinese. ``nanstop explain --symptom`` and the search of the site read it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cache

from nanstop.diagnose.catalogue import CATALOGUE
from nanstop.diagnose.evidence.rule import Rule

SAID: Mapping[str, str] = {
    "NS101": "bf16 model in fp16 nan; gemma t5 fp16 nan; model trained in bfloat16 loaded in "
    "float16; model outputs garbage after fine-tuning fp16 | bf16 模型用 fp16 训练出现 nan",
    "NS102": "ValueError: Attempting to unscale FP16 gradients.; loss nan after first step of "
    "fp16 LoRA; AdamW nan with half weights | 可训练参数是 fp16；第一步之后 loss 变成 nan",
    "NS103": "nan after adding tokens resize_token_embeddings; new special tokens embedding "
    "garbage; untrained tokens nan | 添加新 token 之后 loss nan；resize_token_embeddings",
    "NS104": "Your setup doesn't support bf16/gpu; bf16 not supported on V100 T4 | 显卡不支持 bf16",
    "NS105": "Some weights were not initialized from the model checkpoint; newly initialized "
    "head | 权重没有从检查点初始化",
    "NS106": "NaNs detected in the merged weights; merged weights nan; checkpoint contains nan "
    "weights; model.safetensors has nan | 检查点里有 nan；合并后的权重有 nan",
    "NS107": "QLoRA loss nan; bitsandbytes 4-bit nan; bnb_4bit_compute_dtype float16 nan; "
    "quantized model cannot be fine-tuned | QLoRA loss 为 nan；4bit 量化训练 nan",
    "NS108": "known bug of this version nan; nan after upgrading torch transformers trl; "
    "gradient norm wrong after upgrade | 升级之后 loss nan；版本不兼容",
    "NS109": "ValueError: Cannot handle batch sizes > 1 if no padding token is defined; lm_head "
    "num_labels mismatch | 没有定义 pad token",
    "NS110": "eps 1e-8 in float16 is zero; second moment zero in half precision | fp16 里 eps 为 0",
    "NS111": "loss stuck at ln(V); loss stuck at 10.37; loss does not decrease in bf16; pure "
    "bfloat16 weights do not change; small learning rate update lost | "
    "loss 不下降；bf16 训练 loss 不变；权重不更新",
    "NS112": "clip_grad_norm_ before unscale_; gradients clipped while still scaled; fp16 "
    "without GradScaler | 裁剪在 unscale 之前；没有用 GradScaler",
    "NS113": "lr_scheduler.step() before optimizer.step(); learning rate is 0; learning rate too "
    "high; schedule stepped too often | 学习率为 0；学习率太大",
    "NS114": "RuntimeError: element 0 of tensors does not require grad and does not have a "
    "grad_fn; None of the inputs have requires_grad=True. Gradients will be None; parameters do "
    "not change; gradient checkpointing no gradient | 参数没有梯度；没有 grad_fn；模型不更新",
    "NS115": "loss jumps after resume from checkpoint; optimizer state not restored | "
    "恢复训练之后 loss 突然升高",
    "NS116": "DeepSpeed optimizer step inside engine; optimizer in backward hook | DeepSpeed 更新",
    "NS117": "loss differs with gradient accumulation; gradient_accumulation_steps changes "
    "loss | 梯度累积之后 loss 不一样",
    "NS118": "softmax before cross entropy; CrossEntropyLoss on probabilities; loss does not go "
    "below; BCELoss on logits; targets broadcast warning size different from input size | "
    "交叉熵之前做了 softmax",
    "NS119": "model.eval() never back to train; dropout off after evaluation | eval 之后没有 train",
    "NS201": "loss is nan in fp16; float16 overflow; inf in hidden states; loss 0.0 grad_norm "
    "nan; RuntimeError: probability tensor contains either `inf`, `nan` or element < 0; loss "
    "becomes nan; loss nan | fp16 溢出；loss 为 nan；loss 变成 nan；概率张量包含 inf nan",
    "NS202": "nan in attention; softmax of fully masked row; all padding sequence nan; left "
    "padding nan; eval loss nan with padding | 注意力 nan；整行被掩码；padding 导致 nan",
    "NS203": "attention mask finfo.min overflow; masks added -inf; value cannot be converted to "
    "type at::Half without overflow | 掩码相加溢出",
    "NS204": "sqrt of negative nan; log of negative number nan; division by zero nan; 0 * inf "
    "nan | 负数开方 nan；除以零；对负数取对数",
    "NS205": "mean of empty tensor nan; division by zero number of tokens; loss nan for empty "
    "batch | 空批次 loss nan；分母为 0",
    "NS206": "cosine similarity nan; normalize zero vector nan; F.normalize zero norm | "
    "零向量归一化 nan；余弦相似度 nan",
    "NS207": "log(0) -inf loss; exp overflow inf; loss is inf; log softmax -inf | "
    "loss 为 inf；log(0)",
    "NS208": "fp16 bf16 results differ from fp32; loss worse in half precision; tf32 precision | "
    "半精度结果和 fp32 不一致",
    "NS209": "LayerNorm RMSNorm outputs zero in fp16; overflow becomes 0 | 归一化输出为 0",
    "NS301": "grad_norm inf, nothing learns; grad_norm is inf; gradient overflow; loss fine but "
    "gradients inf nan; gradient explodes | grad_norm inf；梯度溢出；梯度爆炸",
    "NS302": "Gradient overflow. Skipping step, loss scaler 0 reducing loss scale to; loss scale "
    "goes to 0; loss scale keeps decreasing; FloatingPointError: Minimum loss scale reached; "
    "Current loss scale already at minimum - cannot decrease scale anymore | "
    "loss scale 变为 0；损失缩放一直变小",
    "NS303": "gradients are all zero; gradients vanish in fp16; gradient underflow | "
    "梯度全是 0；梯度消失；梯度下溢",
    "NS304": "RuntimeError: Function 'SqrtBackward0' returned nan values in its 0th output.; "
    "Function 'LogBackward0' 'DivBackward0' 'PowBackward0' 'MulBackward0' 'NormBackward' "
    "returned nan values; loss is finite but grad is nan; torch.where nan gradient; sqrt(0) "
    "gradient inf | loss 正常但梯度 nan；反向传播 nan",
    "NS305": "RuntimeError: The total norm of order 2.0 for gradients from `parameters` is "
    "non-finite, so it cannot be clipped; clip_grad_norm nan; error_if_nonfinite | "
    "裁剪之后全部 nan；clip_grad_norm nan",
    "NS306": "gradients multiplied by hand; gradient hook changes gradients; loss scale by hand "
    "not divided | 手动缩放梯度；梯度 hook",
    "NS307": "zero_grad before step; optimizer.zero_grad in the wrong place; update swallowed | "
    "zero_grad 位置错误",
    "NS401": "weights are nan; parameters contain nan before the step; model weights become "
    "nan | 权重是 nan；模型参数变成 nan",
    "NS402": "weights are nan after optimizer.step; optimizer.step makes nan; parameters nan "
    "after update | optimizer.step 之后权重 nan",
    "NS403": "exp_avg_sq negative; optimizer state nan; corrupted optimizer state | "
    "优化器状态损坏；优化器状态 nan",
    "NS404": "loss explodes; loss diverges; loss suddenly 1e34; loss spikes; training diverges | "
    "loss 爆炸；训练发散；loss 突然变得很大",
    "NS501": "nan in input data; dataset contains nan; Input contains NaN, infinity or a value "
    "too large | 输入数据有 nan；数据集里有 nan",
    "NS502": "IndexError: index out of range in self; CUDA error: device-side assert triggered; "
    "IndexError: Target -1 is out of bounds.; Assertion `srcIndex < srcSelectDimSize` failed; "
    "Assertion `t >= 0 && t < n_classes` failed | 索引越界；device-side assert",
    "NS503": "all labels -100; every label masked loss nan; eval loss nan, train loss fine; loss "
    "0.0 grad_norm 0.0; response template not found; truncated prompt no labels | "
    "标签全是 -100；eval loss 为 nan",
    "NS504": "one bad batch nan; nan on a single sample; loss spike on one batch; outlier "
    "sample | 某个 batch 出现 nan；个别样本 nan",
    "NS505": "loss is constant; loss does not change; same label for all samples | "
    "loss 一直不变；标签都一样",
    "NS506": "nan in buffer; torch.empty uninitialized nan; running_mean nan; class weights "
    "inf | buffer 里有 nan；torch.empty",
    "NS601": "Floating point exception (core dumped); Segmentation fault (core dumped); Killed; "
    "exit code 137; exit code 139; exit code -11; exit code -9; SIGKILL; SIGSEGV; SIGFPE | "
    "进程被杀死；段错误；核心已转储；退出码 137",
    "NS602": "nan only with flash attention; loss becomes nan with torch.compile; nan with sdpa; "
    "eager attention works; CUDA error: an illegal memory access was encountered | "
    "flash attention nan；torch.compile nan；换成 eager 就正常",
    "NS603": "nan not reproducible; random nan; nan on one gpu only; faulty gpu; different "
    "results each run | nan 无法复现；偶尔出现 nan；显卡故障",
    "NS604": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate; CUDA out of memory; "
    "CUBLAS_STATUS_ALLOC_FAILED; oom killed; DefaultCPUAllocator: not enough memory | "
    "显存不足；内存不足；爆显存",
    "NS605": "training hangs; training stuck no progress; Watchdog caught collective operation "
    "timeout; NCCL timeout | 训练卡住；NCCL 超时；训练没有进展",
    "NS606": "nan only with multiple gpus; nan with DDP, one gpu fine; all_reduce nan | "
    "多卡训练 nan；单卡正常多卡 nan",
    "NS607": "ranks have different weights; DDP parameters not in sync | 各卡权重不一致",
    "NS701": "GRPO loss 0 reward_std 0; frac_reward_zero_std; advantages are zero; loss 0.0 "
    "grad_norm 0.0 GRPO; all rewards equal | GRPO loss 一直是 0；reward_std 为 0",
    "NS702": "kl is nan; kl explodes; ratio inf PPO GRPO; DPO loss nan; logps very negative | "
    "KL 爆炸；kl 为 nan；DPO loss 为 nan",
    "NS703": "vllm logprobs differ from training; importance sampling ratio; train inference "
    "mismatch | vLLM 与训练的 logprob 不一致",
    "NS704": "reward nan; reward is None; reward function returns nan | 奖励为 nan；reward 为 nan",
    "NS801": "loss 0.0 after nan; logging_nan_inf_filter; logged loss is 0 all the time; "
    "loss is 1.19e+34 | 日志里 loss 为 0；loss 显示 0.0 实际是 nan",
    "NS802": "GRPO loss starts at 0; loss 0.0 grad_norm not zero GRPO; loss of 0 normal | "
    "GRPO 初始 loss 为 0 正常吗",
}
_WORDS = re.compile(r"[a-z0-9_]+|[\u4e00-\u9fff]")
FITS = 0.6
"""Share of what a phrase says, rare words counting more, that a text has to say."""


def said_of(code: str, lang: str = "en") -> tuple[str, ...]:
    """Return what people say of a finding; in Chinese with the errors as they are printed."""
    english, _, chinese = SAID.get(code, "").partition("|")
    own = tuple(filter(None, (one.strip() for one in english.split(";"))))
    if lang == "en":
        return own
    errors = tuple(one for one in own if "Error" in one)
    return (*filter(None, (one.strip() for one in chinese.split("；"))), *errors)


def findings_said(text: str, most: int = 5) -> tuple[Rule, ...]:
    """Return the findings of which people say what a text does, the nearest first."""
    asked = set(_words(text))
    weights = _weights()
    found: list[tuple[float, int, Rule]] = []
    for at, rule in enumerate(CATALOGUE):
        nearest = max(
            (_share(phrase, asked, weights) for phrase in _phrases(rule.code)), default=(0.0, 0.0)
        )
        if nearest[0] >= FITS:
            found.append((-nearest[0] * nearest[1], at, rule))
    return tuple(rule for *_, rule in sorted(found)[:most])


def _phrases(code: str) -> tuple[str, ...]:
    return (*said_of(code), *said_of(code, "zh"))


def _share(phrase: str, asked: set[str], weights: Mapping[str, float]) -> tuple[float, float]:
    """Return the share of a phrase that is asked for, and how much that is."""
    words = set(_words(phrase))
    whole = sum(weights[word] for word in words)
    met = sum(weights[word] for word in words & asked)
    return (met / whole if whole else 0.0, met)


def _words(text: str) -> list[str]:
    return _WORDS.findall(text.lower())


@cache
def _weights() -> Mapping[str, float]:
    """Return how rare each word is among the phrases."""
    phrases = [set(_words(one)) for code in SAID for one in _phrases(code)]
    words = set[str]().union(*phrases)
    return {w: math.log(1 + len(phrases) / sum(w in one for one in phrases)) for w in words}
