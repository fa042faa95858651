"""Memory ran out.

## What happened
Either an allocation failed and raised (`torch.OutOfMemoryError` on a GPU, `can't allocate memory`
on the CPU), or the Linux kernel killed the process: exit code 137, no traceback, and the log simply
stops.

## Why it happens
With AdamW in mixed precision a trainable parameter costs 16 bytes before any activation: 4 for the
weight, 4 for the gradient, 8 for two moments. 7e9 of them are 112 GB. Activations grow with batch x
length, logits with batch x length x vocabulary: 4 x 4096 x 152064 in float32 are 10 GB, once for
the logits and again for their gradient. In a container the limit is that of its control group, not
the machine's.

## Example
```
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.28 GiB.
memory.events of the control group: oom_kill 1
```

## Fix
1. A smaller `per_device_train_batch_size` with more `gradient_accumulation_steps`. Cost: a little
   time, and another loss where it is not divided by the tokens of the whole window (NS117).
2. `activation_checkpointing=True` (once `gradient_checkpointing`, a name of which transformers 5.23
   warns). TRL's configs have it on by default. Cost: about 30 % of step time.
3. Shorter `max_length`, or a loss that never holds all logits. Cost: what is cut off.
4. LoRA, or an 8-bit optimizer. Cost: another training; see NS102 and NS402 for what to look after.
5. Against fragmentation, `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`. Cost: none.

## Fix safety
The second and the last keep the mathematics, and so does the first for a loss that is divided by
the tokens of the window. The others change training.

## Not to be confused with
NS601: killed without a sign that memory was short.
A `SIGBUS` is shared memory (/dev/shm) that is full.

## References
- https://github.com/hiyouga/LlamaFactory/issues/6040
- https://github.com/huggingface/transformers/issues/30860
"""

from __future__ import annotations

from nanstop.diagnose.evidence.process_end import (
    last_op_lines,
    op_in_title,
    signals_named,
    unnatural_end,
)
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import Diagnosis, Evidence


def check(evidence: Evidence) -> Diagnosis | None:
    """Return what ran out of memory: an allocation, or a process that was killed."""
    end = unnatural_end(evidence, "oom")
    if end is None:
        return None
    killed = end.name == "SIGKILL"
    said = end.message or "an allocation failed"
    return Diagnosis(
        code="NS604",
        title="out of memory" + (": killed by the kernel" if killed else op_in_title(evidence)),
        cause="the kernel killed the process for want of memory" if killed else _plain(said),
        confidence="certain",
        lines=(*last_op_lines(evidence, fatal=not killed), *signals_named(evidence, "evidence")),
    )


def _plain(message: str) -> str:
    return f"allocation failed: {message.rstrip('.')}"


RULE = Rule("NS604", "out-of-memory", "memory ran out", check, ("incident",))
