"""What is trained behind a step, whose derivative is 0, is told with its line; gradients of zeros
that are meant, or come from elsewhere, are not.
"""

import pytest
import torch
from torch import nn

from loop_scripts import findings_of

torch.set_num_threads(1)


class Coder(nn.Module):
    def __init__(self, between):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))
        self.between = between

    def forward(self, x):
        return self.decoder(self.between(self.encoder(x) * 4.0) / 4.0)


def trained(between, *, loss_of=None, made=torch.optim.Adam):
    model = Coder(between)
    optimizer = made(model.parameters(), 1e-2)
    for step in range(12):
        torch.manual_seed(step)
        x = torch.randn(16, 8)
        out = model(x)
        loss = (out - x).square().mean() if loss_of is None else loss_of(model, out, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def rounded(code):
    return torch.round(code)


def signs(code):
    return code.sign() + 0.1


def floors(code):
    return (code + 0.5).floor()


@pytest.mark.parametrize("between", [rounded, signs, floors])
@pytest.mark.parametrize("made", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_what_lies_behind_a_step_is_told_with_its_line(tmp_path, between, made):
    found = findings_of(tmp_path, lambda: trained(between, made=made))["NS114"]
    line = {rounded: "torch.round(code)", signs: "code.sign()", floors: ".floor()"}[between]
    assert "a part lies behind a step" in found.title
    assert "`encoder.0.weight`" in found.cause
    assert "decoder" not in found.cause
    assert any(line in one for one in found.lines)


def straight(code):
    return code + (torch.round(code) - code).detach()


def noisy(code):
    return code + torch.rand_like(code) - 0.5


def a_rest(code):
    return code - torch.floor(code)


def dead(code):
    return torch.relu(code - 1e4)


def cut_short(code):
    return (code + 1e4).clamp(-1.0, 1.0)


def no_gate(code):
    return 0.0 * code


@pytest.mark.parametrize("between", [straight, noisy, a_rest, dead, cut_short, no_gate])
def test_what_gets_its_gradients_or_has_none_for_another_reason(tmp_path, between):
    assert "NS114" not in findings_of(tmp_path, lambda: trained(between))


def test_a_loss_that_is_content_and_numbers_that_are_shown(tmp_path):
    def content(_model, out, x):
        return torch.relu((out - x).abs().mean() - 100.0)

    def counted(_model, out, x):
        shown = torch.round(out).eq(torch.round(x)).float().mean()
        return (out - x).square().mean() + 0.0 * shown

    for loss_of in (content, counted):
        found = findings_of(tmp_path, lambda: trained(nn.Identity(), loss_of=loss_of))  # noqa: B023
        assert "NS114" not in found


def test_a_part_that_other_parts_not_of_the_model_teach(tmp_path):
    def taught(model, out, x):
        return (out - x).square().mean() + 1e-3 * model.encoder(x).square().mean()

    assert "NS114" not in findings_of(tmp_path, lambda: trained(rounded, loss_of=taught))


def minus_itself(_model, out, x):
    score = out.log_softmax(-1)
    old = score
    return (score - old).exp()


def divided_by_its_sum(_model, out, x):
    weights, _ = out.softmax(-1).topk(1)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20)


def minus_a_mean_of_one(_model, out, x):
    return (out[:, :1] - out[:, :1].mean(-1, keepdim=True)).exp()


@pytest.mark.parametrize("ratio", [minus_itself, divided_by_its_sum, minus_a_mean_of_one])
def test_what_is_compared_with_itself_is_told_with_its_line(tmp_path, ratio):
    def trained_beside(detached):
        model = Coder(nn.Identity())
        model.value = nn.Linear(8, 8)
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        for step in range(12):
            torch.manual_seed(step)
            x = torch.randn(16, 8)
            weight = ratio(model, model(x), x)
            if detached:
                weight = weight.detach()
            loss = (weight * x).mean() + (model.value(x) - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    found = findings_of(tmp_path, lambda: trained_beside(detached=False))["NS114"]
    assert "a part is compared with itself" in found.title
    assert "encoder.0.weight`" in found.cause
    assert "8 tensors" in found.cause
    line = {
        minus_itself: "score - old",
        divided_by_its_sum: "weights / (",
        minus_a_mean_of_one: "out[:, :1] - out",
    }
    assert any(line[ratio] in one for one in found.lines)


def test_all_that_is_trained_is_compared_with_itself(tmp_path):
    def loss_of(_model, out, x):
        score = out.log_softmax(-1)[:, 0]
        ratio = (score - score).exp()
        return -(ratio * x[:, 0]).mean()

    found = findings_of(tmp_path, lambda: trained(nn.Identity(), loss_of=loss_of))["NS114"]
    assert "all that is trained is compared with itself" in found.title
    assert "(score - score).exp()" in found.usual_cure


def detached(_model, out, x):
    score = out.log_softmax(-1)
    return -((score - score.detach()).exp() * x).mean() + 1e-9 * out.square().mean()


def twins_at_first(_model, out, x):
    return (out - 1.0 * out).square().mean() + (out - x).square().mean()


def a_bias_before_a_norm(model, out, x):
    return (torch.nn.functional.batch_norm(out, None, None, training=True) - x).square().mean()


@pytest.mark.parametrize("loss_of", [detached, twins_at_first, a_bias_before_a_norm])
def test_what_is_compared_with_another_or_learns_all_the_same(tmp_path, loss_of):
    assert "NS114" not in findings_of(tmp_path, lambda: trained(nn.Identity(), loss_of=loss_of))
