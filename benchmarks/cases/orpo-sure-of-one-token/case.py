"""ORPO with answers of one token, in bfloat16:
the model is soon so sure that 1 - exp(logp) is exactly 0.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from torch.nn import functional as F

from tiny import build, finish, token_batches


def log_odds(logp, *, stable: bool):
    """log(p / (1 - p))."""
    if not stable:
        return logp - torch.log1p(-torch.exp(logp))
    # 1 - p is the sum of the others' probabilities; no nearer to 0 than float32 resolves near 1.
    return logp - torch.log(-torch.expm1(logp.clamp(max=-1e-7)))


def train(*, stable: bool) -> None:
    model = build("CohereForCausalLM", logit_scale=1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for number in range(40):
        ids = token_batches(1, rows=4, length=8, seed=number)[0]["input_ids"]
        answers = torch.full((4,), 20)  # "yes"
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(ids).logits[:, -1]
        logp = F.log_softmax(logits.float() if stable else logits, -1)
        chosen, rejected = (logp.gather(1, a[:, None])[:, 0] for a in (answers, 41 - answers))
        margin = log_odds(chosen, stable=stable) - log_odds(rejected, stable=stable)
        loss = -chosen.mean() - 0.1 * F.logsigmoid(margin).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {number} loss {loss.item():.4g} chosen {chosen.max().item():.3g}")
    finish(model, token_batches(1, seed=99)[0])


if __name__ == "__main__":
    train(stable=False)
