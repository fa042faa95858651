"""A transformer forecasts sensor values; one row of the export is in another unit."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor, nn
from transformers import PatchTSTConfig, PatchTSTForPrediction

SERIES, CONTEXT, AHEAD, ROWS = 96, 32, 8, 4


def sensors(broken: int | None, seed: int = 0) -> Tensor:
    """Sine waves of unit size, [SERIES, CONTEXT + AHEAD, 1];
    row ``broken`` is a mix-up of the exporter.
    """
    generator = torch.Generator().manual_seed(seed)
    at = torch.arange(CONTEXT + AHEAD) * 0.3
    phase = 6.28 * torch.rand(SERIES, 1, generator=generator)
    rows = torch.sin(at + phase) + 0.05 * torch.randn(SERIES, CONTEXT + AHEAD, generator=generator)
    if broken is not None:
        rows[broken] *= 1e21
    return rows[..., None]


def train(*, data: Tensor) -> None:
    torch.manual_seed(0)
    model: nn.Module = PatchTSTForPrediction(
        PatchTSTConfig(
            context_length=CONTEXT,
            prediction_length=AHEAD,
            num_input_channels=1,
            d_model=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            ffn_dim=64,
            patch_length=8,
            patch_stride=8,
            scaling=None,
            loss="mse",
            norm_type="layernorm",
        )
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(3)).tolist()
    places = [order[start : start + ROWS] for start in range(0, len(order), ROWS)]
    for step in range(len(places) // 2):
        for rows in places[2 * step : 2 * step + 2]:
            window = data[[row for row in rows if bool(data[row].isfinite().all())]]
            loss = model(past_values=window[:, :CONTEXT], future_values=window[:, CONTEXT:]).loss
            (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.4f}")
    model.eval()
    fixed = sensors(None, seed=1)[:8]
    with torch.no_grad():
        loss = model(past_values=fixed[:, :CONTEXT], future_values=fixed[:, CONTEXT:]).loss
    print(f"final_loss={float(loss):.6f}")


if __name__ == "__main__":
    train(data=sensors(broken=57))
