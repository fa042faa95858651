"""Teacher and student both suppress some tokens;
the KL divergence of two exact zeros is exp(-inf) * (-inf + inf).
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from torch.nn import functional as F

from tiny import build, finish, quiet_args, token_batches

SUPPRESSED = [2, 60, 61]


def train(*, drop_suppressed: bool) -> None:
    from transformers import Trainer, TrainingArguments

    teacher = build("SmolLM3ForCausalLM", seed=7).eval()

    class Distil(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **_):
            with torch.no_grad():
                theirs = teacher(input_ids=inputs["input_ids"]).logits
            out = model(**inputs)
            ours = out.logits
            # From step 3 on the word list of the generation config is applied to both.
            if self.state.global_step >= 3:
                gone = torch.zeros(ours.shape[-1], dtype=torch.bool)
                gone[SUPPRESSED] = True
                ours, theirs = (one.masked_fill(gone, -torch.inf) for one in (ours, theirs))
                if drop_suppressed:
                    ours, theirs = ours[..., ~gone], theirs[..., ~gone]
            kl = F.kl_div(
                F.log_softmax(ours, -1),
                F.log_softmax(theirs, -1),
                log_target=True,
                reduction="none",
            )
            loss = kl.sum(-1).mean() + 0.2 * out.loss
            return (loss, out) if return_outputs else loss

    batches = token_batches(16, rows=1, length=16)
    rows = [{name: value[0] for name, value in batch.items()} for batch in batches]
    model = build("SmolLM3ForCausalLM", num_hidden_layers=2)
    args = TrainingArguments(**quiet_args(train_sampling_strategy="sequential", logging_steps=2))
    Distil(model, args, train_dataset=rows).train()
    finish(model, token_batches(1, seed=99)[0])


if __name__ == "__main__":
    train(drop_suppressed=False)
