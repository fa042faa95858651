"""A graph convolution over correlations: edges carry weights of both signs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "cases"))

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NODES, KINDS = 30, 3


class GraphConvolution(nn.Module):
    def __init__(self, inputs: int, outputs: int, by_size: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.by_size = by_size

    def forward(self, nodes: Tensor, edges: Tensor, weight: Tensor) -> Tensor:
        source, target = edges
        counted = weight.abs() if self.by_size else weight
        degree = torch.zeros(len(nodes)).index_add(0, target, counted)
        inverse = degree.pow(-0.5)
        inverse = inverse.masked_fill(inverse == float("inf"), 0.0)
        carried = inverse[source] * weight * inverse[target]
        passed = carried[:, None] * self.linear(nodes)[source]
        return torch.zeros(len(nodes), passed.shape[1]).index_add(0, target, passed)


class Network(nn.Module):
    def __init__(self, by_size: bool) -> None:
        super().__init__()
        self.first = GraphConvolution(8, 16, by_size)
        self.second = GraphConvolution(16, KINDS, by_size)

    def forward(self, nodes: Tensor, edges: Tensor, weight: Tensor) -> Tensor:
        return self.second(self.first(nodes, edges, weight).relu(), edges, weight)


def graph(seed: int, signed: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A ring with chords; features tell the kind; weights are correlations if ``signed``."""
    draw = torch.Generator().manual_seed(seed)
    kind = torch.arange(NODES) % KINDS
    nodes = torch.randn(NODES, 8, generator=draw) + 2.0 * F.one_hot(kind, 8)
    near = torch.arange(NODES)
    edges = torch.stack([near.repeat(3), torch.cat([near, (near + 3) % NODES, (near + 9) % NODES])])
    weight = torch.rand(edges.shape[1], generator=draw)
    if signed:
        weight = weight - 0.5
        weight[:NODES] += 0.3
    return nodes, edges, weight, kind


def train(*, by_size: bool) -> None:
    torch.manual_seed(0)
    model = Network(by_size)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(40):
        nodes, edges, weight, kind = graph(step, signed=step >= 12)
        loss = F.cross_entropy(model(nodes, edges, weight), kind)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")
    with torch.no_grad():
        nodes, edges, weight, kind = graph(1000, signed=False)
        print(f"final_loss={F.cross_entropy(model(nodes, edges, weight), kind).item():.6f}")


if __name__ == "__main__":
    train(by_size=False)
