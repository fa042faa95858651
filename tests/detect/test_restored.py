"""What a script restores in the wrong place: moments of another parameter, weights under other
names; and what only looks like it.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from loop_scripts import findings_of

torch.set_num_threads(1)


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        *(part for _ in range(4) for part in (nn.Linear(24, 24), nn.Tanh())), nn.Linear(24, 4)
    )


def data(seed):
    made = torch.Generator().manual_seed(seed)
    scales = torch.logspace(-1, 1, 24)
    for _ in range(8):
        yield torch.randn(16, 24, generator=made) * scales, torch.randint(4, (16,), generator=made)


def learn(model, optimizer, seed, factor=1.0):
    for x, y in data(seed):
        optimizer.zero_grad()
        (factor * F.cross_entropy(model(x), y)).backward()
        optimizer.step()


def gone_on(model, kind, order, **more):
    """Train, restore the optimizer's state over parameters in another order, train on."""
    first = kind(model.parameters(), lr=1e-3)
    learn(model, first, 0)
    second = kind(order(list(model.parameters())), lr=1e-3)
    second.load_state_dict(first.state_dict())
    learn(model, second, 1, **more)


def of_one_shape_backwards(parameters):
    places = [n for n, p in enumerate(parameters) if p.shape == (24, 24)]
    swapped = dict(zip(places, places[::-1], strict=True))
    return [parameters[swapped.get(n, n)] for n in range(len(parameters))]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RMSprop])
def test_moments_of_another_parameter(tmp_path, kind):
    model = net()
    findings = findings_of(tmp_path, lambda: gone_on(model, kind, of_one_shape_backwards))
    assert findings["NS115"].title == "parameters have each other's moments"
    assert "load_state_dict" in findings["NS115"].lines[0]
    assert findings["NS115"].confidence == "likely"


@pytest.mark.parametrize("factor", [1.0, 100.0])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_moments_of_the_same_parameters_on_other_data(tmp_path, kind, factor):
    model = net()
    train = lambda: gone_on(model, kind, list, factor=factor)  # noqa: E731
    assert "NS115" not in findings_of(tmp_path, train)


def test_moments_without_a_structure(tmp_path):
    """Weights that see noise alone: no parameter's moments fit it better than another's."""
    torch.manual_seed(0)
    one, two = (nn.Parameter(torch.zeros(32, 32)) for _ in range(2))

    def train():
        for _ in range(2):
            optimizer = torch.optim.Adam([one, two], lr=1e-3)
            if saved:
                optimizer.load_state_dict(saved.pop())
            for _ in range(6):
                optimizer.zero_grad()
                ((one + two * 2) * torch.randn(32, 32)).sum().backward()
                optimizer.step()
            saved.append(optimizer.state_dict())

    saved = []
    assert "NS115" not in findings_of(tmp_path, train)


class Headed(nn.Module):
    def __init__(self, outputs=4):
        super().__init__()
        self.body, self.head = nn.Linear(24, 16), nn.Linear(16, outputs)

    def forward(self, x):
        return self.head(self.body(x).tanh())


def renamed(saved, old, new):
    return {name.replace(old, new): value for name, value in saved.items()}


def loaded(change, *, outputs=4, after=None):
    """Load what ``change`` makes of another model's weights, and train."""
    torch.manual_seed(1)
    saved, model = change(Headed().state_dict()), Headed(outputs)
    model.load_state_dict(saved, strict=False)
    if after is not None:
        after(model, saved)
    learn(model, torch.optim.SGD(model.parameters(), lr=1e-3), 0)


@pytest.mark.parametrize(
    ("old", "new"), [("head.", "fc."), ("", "module."), ("body", "model.body")]
)
def test_weights_under_other_names(tmp_path, old, new):
    def change(saved):
        if not old:
            return {new + name: value for name, value in saved.items()}
        return renamed(saved, old, new)

    finding = findings_of(tmp_path, lambda: loaded(change))["NS105"]
    assert finding.confidence == "likely"
    assert "load_state_dict" in finding.lines[0]


def test_weights_under_other_names_after_another_training(tmp_path):
    def train():
        learn(first := Headed(), torch.optim.SGD(first.parameters(), lr=1e-3), 0)
        loaded(lambda _: renamed(first.state_dict(), "head.", "fc."))

    assert "NS105" in findings_of(tmp_path, train)


def by_hand(model, saved):
    with torch.no_grad():
        model.head.weight.copy_(saved["fc.weight"])


@pytest.mark.parametrize(
    ("change", "more"),
    [
        (dict, {}),
        (lambda saved: renamed(saved, "head.", "fc."), {"outputs": 7}),
        (lambda saved: renamed(saved, "head.", "fc."), {"after": by_hand}),
        (lambda saved: {n: v for n, v in saved.items() if "body" in n}, {}),
        (lambda saved: saved | {"decoder.weight": torch.zeros(9, 9)}, {}),
    ],
    ids=["all", "another head", "the rest by hand", "the body alone", "a part that is not used"],
)
def test_what_was_loaded_as_it_was_meant(tmp_path, change, more):
    assert "NS105" not in findings_of(tmp_path, lambda: loaded(change, **more))


class Branches(nn.Module):
    """Layers of one shape that read the same and count for more or less; what they read has no
    large and small features by which an element could be told from another.
    """

    def __init__(self, shares):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in shares)
        self.head = nn.Linear(24, 4)
        self.shares = shares

    def forward(self, x):
        pairs = zip(self.shares, self.layers, strict=True)
        return self.head(torch.tanh(sum(share * layer(x) for share, layer in pairs)))


def resumed(model, order, shares, seed=1):
    """Train, restore the optimizer's state over parameters in another order, train on."""

    def learn_on(optimizer, seed):
        made = torch.Generator().manual_seed(seed)
        for _ in range(8):
            optimizer.zero_grad()
            labels = torch.randint(4, (64,), generator=made)
            F.cross_entropy(model(torch.randn(64, 24, generator=made)), labels).backward()
            optimizer.step()

    first = torch.optim.Adam(model.parameters(), lr=1e-3)
    learn_on(first, 0)
    second = torch.optim.Adam(order(list(model.parameters())), lr=1e-3)
    second.load_state_dict(first.state_dict())
    model.shares = shares
    learn_on(second, seed)


SHARES = (1.0, 0.8, 0.01, 0.012)


def test_moments_whose_sizes_are_those_of_others(tmp_path):
    model = Branches(SHARES)
    train = lambda: resumed(model, of_one_shape_backwards, SHARES)  # noqa: E731
    findings = findings_of(tmp_path, train)
    assert findings["NS115"].title == "parameters have each other's moments"
    assert "4 of 4 parameters" in findings["NS115"].cause


@pytest.mark.parametrize(
    "later",
    [
        SHARES,
        (0.1, 0.08, 0.001, 0.0012),  # all smaller
        (0.01, 0.8, 0.01, 0.012),  # one layer counts for less by now
        (0.01, 0.8, 1.0, 0.012),  # two heads have changed their weights in the loss
        (1.0, 1.0, 1.0, 1.0),
        (1.0, 0.8, 0.0, 0.0),
    ],
)
def test_sizes_that_change_when_a_training_goes_on(tmp_path, later):
    model = Branches(SHARES)
    assert "NS115" not in findings_of(tmp_path, lambda: resumed(model, list, later))


SIZES = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def reloaded(written, read, folder, rename=("", "")):
    """Load what a model of one class wrote, renamed, as a model of another, and train."""
    from safetensors.torch import load_file, save_file
    from transformers import BertConfig

    written(BertConfig(**SIZES, intermediate_size=16)).save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file(renamed(load_file(file), *rename), file, metadata={"format": "pt"})
    model = read.from_pretrained(folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(2):
        model(input_ids=torch.arange(8)[None])[0].square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_folder_with_other_names(tmp_path):
    from transformers import BertForSequenceClassification as Classifier

    names = ("classifier", "score")
    finding = findings_of(tmp_path, lambda: reloaded(Classifier, Classifier, tmp_path, names))
    assert finding["NS105"].confidence == "likely"
    assert "from_pretrained" in finding["NS105"].lines[0]


def test_a_new_head_of_the_shape_of_an_old_one(tmp_path):
    """The two classes of a next sentence have nothing to do with the two that are to be learned."""
    from transformers import BertForPreTraining, BertForSequenceClassification

    def train():
        reloaded(BertForPreTraining, BertForSequenceClassification, tmp_path)

    assert "NS105" not in findings_of(tmp_path, train)


def test_a_folder_that_fits(tmp_path):
    from transformers import BertForMaskedLM

    assert "NS105" not in findings_of(
        tmp_path, lambda: reloaded(BertForMaskedLM, BertForMaskedLM, tmp_path)
    )
