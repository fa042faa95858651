"""The process was killed by a signal.

## What happened
The training process did not raise an exception: the operating system ended it. SIGFPE, SIGSEGV,
SIGABRT, SIGBUS and SIGILL come from native code inside the process, SIGKILL from outside. The shell
shows `Floating point exception (core dumped)` or exit code 128 + n: 136 for SIGFPE, 139 for
SIGSEGV, 134 for SIGABRT, 137 for SIGKILL.

## Why it happens
NaN and Inf raise no signal: 0.0 / 0.0 is NaN, silently. SIGFPE on x86 is an integer division by
zero (or -2^31 / -1), in practice a library that computes how to split a matrix product and gets 0
tiles: cuBLAS from 12.1 to before 12.3.4.1 did so on H20 for some shapes of bfloat16 products (64 x
14688 x 1536 is one in float16). SIGSEGV is an address that is not mapped, SIGABRT a failed
assertion, SIGBUS a mapped page that cannot be filled, often /dev/shm of 64 MiB in a container.

## Example
```
step 0, forward, layers.0.mlp.down_proj: aten.mm.default bfloat16 [64, 4864] x bfloat16 [4864, 896]
Floating point exception (core dumped)
```

## Fix
1. Look at the operation: `nanstop run --record` names the last one with its shapes; after a first
   death the next run in the same folder records by itself. Cost: about 30 microseconds an
   operation; compiled code runs eagerly.
2. Compare the stack with the known defects (NS108) and update the library that it names.
   Cost: an update.
3. Find the setting that matters: `nanstop bisect BAD GOOD --script S`.
   Cost: about log2 of the settings in runs.
4. Run the operation in float32, or with other shapes (another batch size or padding).
   Cost: speed, memory.

## Fix safety
An update of a library and float32 keep the mathematics. Another batch size changes training.

## Not to be confused with
NS604: the kernel killed it for want of memory. A device assert (NS502) is an exception. A learning
rate or a loss that is out of range cannot raise SIGFPE.

## References
- https://github.com/huggingface/trl/issues/2906
- https://github.com/pytorch/pytorch/issues/133548
- https://github.com/pytorch/pytorch/issues/152017
- https://github.com/hiyouga/LlamaFactory/issues/2750
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

CAUSES = {
    "SIGFPE": "native code divided an integer by zero; NaN and Inf raise no signal",
    "SIGSEGV": "native code touched memory that is not its own",
    "SIGABRT": "native code gave up: a failed assertion, a damaged heap or an uncaught C++ "
    "exception",
    "SIGBUS": "a mapped page could not be filled: a truncated file, or a full /dev/shm",
    "SIGILL": "native code holds an instruction that this processor does not have",
    "SIGKILL": "something outside the process killed it; no out-of-memory kill was seen",
}
FROM_OUTSIDE = ("SIGKILL",)


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the signal that ended the process, with the last operation."""
    end = unnatural_end(evidence, "signal")
    if end is None:
        return None
    outside = end.name in FROM_OUTSIDE
    lines = last_op_lines(evidence, fatal=not outside)
    found = evidence.localization
    return Diagnosis(
        code="NS601",
        title=f"process killed by {end.name}" + op_in_title(evidence, known=not outside),
        cause=CAUSES.get(end.name, "the operating system ended the process"),
        confidence="possible" if outside else "certain",
        lines=(*lines, *signals_named(evidence, "evidence")),
        where=found.key.module if found is not None and not outside else "",
    )


RULE = Rule(
    "NS601", "process-killed", "process killed by a signal", check, ("incident",), beside=("NS108",)
)
