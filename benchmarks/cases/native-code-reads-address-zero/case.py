"""A metric in native code is handed a buffer that was never allocated."""

import ctypes
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from transformers import Trainer, TrainerCallback, TrainingArguments

from tiny import build, finish, quiet_args, token_batches


class NativeMetric(TrainerCallback):
    """Copies its ring of losses out of a C library after each step; the ring is made late."""

    def __init__(self, ready: bool) -> None:
        self.buffer = ctypes.create_string_buffer(8) if ready else None

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step == 3:
            place = ctypes.addressof(self.buffer) if self.buffer else 0
            self.last = ctypes.c_double.from_address(place).value


def train(*, ready: bool) -> None:
    model = build("XGLMForCausalLM", d_model=64, num_layers=2, attention_heads=4, ffn_dim=128)
    rows = [{key: value[0] for key, value in batch.items()} for batch in token_batches(16, rows=1)]
    args = TrainingArguments(**quiet_args(max_steps=6))
    Trainer(model=model, args=args, train_dataset=rows, callbacks=[NativeMetric(ready)]).train()
    finish(model, token_batches(1, seed=1)[0])


if __name__ == "__main__":
    train(ready=False)
