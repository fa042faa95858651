"""The rows of a data set that a micro-batch was made of are known, or said to be unknown.

The random streams are as without it.
"""

import gc
import random
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

import hf_cases as cases
import nanstop
from loop_scripts import investigated
from nanstop.hosts.data_rows import DataRows
from nanstop.report.text.terminal import render
from nanstop.rewrite.change import change_for
from nanstop.rewrite.files import read

NUM_ROWS = 40


class Rows(Dataset):
    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, row):
        return {"input_ids": torch.arange(8) + 100 * row, "noise": torch.rand(2)}


class Stream(IterableDataset):
    def __iter__(self):
        return (Rows()[row] for row in range(NUM_ROWS))


class Eager(Sampler):
    """Draws when its iterator is made, not with the first index."""

    def __init__(self):
        self.calls = 0

    def __iter__(self):
        self.calls += 1
        return iter(torch.randperm(NUM_ROWS).tolist())

    def __len__(self):
        return NUM_ROWS


def by_length(samples):
    """As many scripts have it: sorted, so that a sample is not where its row was drawn."""
    samples = sorted(samples, key=lambda one: -float(one["noise"][0]))
    return {name: torch.stack([one[name] for one in samples]) for name in samples[0]}


def joined(samples):
    ids = torch.cat([one["input_ids"] for one in samples])[None]
    return {"input_ids": ids, "position_ids": torch.arange(8).repeat(len(samples))[None]}


LOADERS = {
    "in order": lambda: DataLoader(Rows(), batch_size=4),
    "shuffled": lambda: DataLoader(Rows(), batch_size=4, shuffle=True),
    "workers": lambda: DataLoader(Rows(), batch_size=3, shuffle=True, num_workers=2),
    "kept workers": lambda: DataLoader(
        Rows(), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "own sampler": lambda: DataLoader(Rows(), batch_size=4, sampler=Eager(), drop_last=True),
    "stream": lambda: DataLoader(Stream(), batch_size=4),
}


def epochs(loader, rows=None):
    """The rows that each batch of two epochs says it was made of, by its own ids; what was found
    for it; the random state after each.
    """
    torch.manual_seed(0)
    random.seed(0)
    if rows is not None:
        rows.follow(loader)
    found = []
    for epoch in range(2):
        for num, batch in enumerate(loader):
            if epoch == 0 and num == 5:
                break
            told = rows.rows_of(batch) if rows is not None else None
            truth = tuple((batch["input_ids"][:, 0] // 100).tolist())
            found.append((truth, told and told.rows, batch["noise"].sum().item()))
        found.append(torch.get_rng_state().sum().item())
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if "workers" in n else []) for n in LOADERS]
)
def test_the_rows_of_each_batch_are_known_and_nothing_else_is_drawn(name):
    plain, rows = epochs(LOADERS[name]()), DataRows("train")
    followed = epochs(loader := LOADERS[name](), rows)
    batches = [one for one in followed if isinstance(one, tuple)]
    assert [told for _, told, _ in batches] == [truth for truth, _, _ in batches]
    assert [one if not isinstance(one, tuple) else one[::2] for one in followed] == [
        one if not isinstance(one, tuple) else one[::2] for one in plain
    ]
    rows.end()
    assert "_get_iterator" not in vars(loader)


def first(loader, *, moved=False):
    rows = DataRows("train")
    rows.follow(loader)
    batch = next(iter(loader))
    if moved:
        batch = {name: value.clone() for name, value in batch.items()}
    return batch, rows.rows_of(batch), rows


def test_a_batch_that_was_moved_is_known_by_its_bytes_and_one_that_was_changed_is_not():
    _, told, rows = first(DataLoader(Rows(), batch_size=4, shuffle=True), moved=True)
    assert told is not None
    assert told.in_order
    batch, _, rows = first(DataLoader(Rows(), batch_size=4), moved=True)
    batch["input_ids"] += 1
    assert rows.rows_of(batch) is None
    assert rows.rows_of({"input_ids": torch.full((4, 8), torch.nan)}) is None


def of_preferences(samples):
    ids = torch.stack([one["input_ids"] for one in samples])
    return {"input_ids": torch.cat([ids, ids + 1]), "margin": torch.ones(len(samples))}


def test_rows_of_two_sequences_are_known_without_an_order():
    _, told, _ = first(DataLoader(Rows(), batch_size=4, collate_fn=of_preferences))
    assert told.rows == (0, 1, 2, 3)
    assert not told.in_order
    assert not told.by_row  # a function of the script's own may have sorted them


def test_a_batch_of_nan_is_known_too():
    class Bad(Rows):
        def __getitem__(self, row):
            return {"x": torch.full((3,), torch.nan) * (row + 1)}

    class Marked(Rows):
        def __getitem__(self, row):
            return {"x": torch.tensor([torch.nan, float(row), 1.0])}

    assert first(DataLoader(Marked(), batch_size=2), moved=True)[1].rows == (0, 1)
    loader, rows = DataLoader(Bad(), batch_size=2), DataRows("train")
    rows.follow(loader)
    *_, last = iter(loader)
    assert rows.rows_of(last).rows == (38, 39)
    assert rows.rows_of({"x": last["x"].clone()}) is None  # all batches look alike


def test_a_function_of_the_scripts_own_may_sort_its_samples():
    torch.manual_seed(1)
    _, told, _ = first(DataLoader(Rows(), batch_size=4, collate_fn=by_length))
    assert (told.in_order, sorted(told.rows), told.row(0)) == (False, [0, 1, 2, 3], None)


def test_samples_that_were_joined_are_told_by_their_tokens():
    loader = DataLoader(Rows(), batch_size=3, collate_fn=joined)
    _, told, _ = first(loader)
    assert (told.starts, told.rows) == ((0, 8, 16), (0, 1, 2))


def packed(*, pad_to=None, **changed):
    """The first batch of rows that TRL packed, as its own collator joins them, and its rows."""
    from datasets import Dataset as Table
    from trl import pack_dataset
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    table = Table.from_dict({"input_ids": [[one] * (2 + one % 5) for one in range(1, 30)]})
    table = pack_dataset(table, seq_length=16, strategy="bfd")
    collate = DataCollatorForLanguageModeling(
        pad_token_id=0, padding_free=True, pad_to_multiple_of=pad_to
    )
    loader = DataLoader(table, batch_size=3, shuffle=True, collate_fn=collate)
    rows = DataRows("train as it was packed")
    rows.follow(loader)
    batch = next(iter(loader)) | changed
    return table, batch, rows.rows_of(batch)


@pytest.mark.parametrize("pad_to", [None, 64])
def test_rows_that_were_packed_are_told_by_their_tokens(pad_to):
    torch.manual_seed(1)
    table, batch, told = packed(pad_to=pad_to)
    assert len(told.rows) == 3
    ids = [one for row in told.rows for one in table[row]["input_ids"]]
    assert batch["input_ids"][0, : len(ids)].tolist() == ids
    for token, one in enumerate(ids):
        assert one in table[told.row(0, token)]["input_ids"]
    assert told.starts[1] == len(table[told.rows[0]]["input_ids"])


def test_rows_of_a_batch_that_is_not_joined_as_the_data_set_says_are_unknown():
    torch.manual_seed(1)
    _, batch, _ = packed()
    moved = batch["position_ids"].clone()
    moved[0, 5] = 0
    torch.manual_seed(1)
    assert packed(position_ids=moved)[2] is None


@pytest.mark.slow
def test_batches_of_the_data_sets_own_and_streams_of_workers_are_unknown():
    assert first(DataLoader(Rows(), batch_size=None))[1] is None
    assert first(DataLoader(Stream(), batch_size=4, num_workers=2))[1] is None


class BadRow(Dataset):
    """Row 37 has an id that the model does not know."""

    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, row):
        ids = (torch.arange(16) + row) % 60 + 3
        if row == 37:
            ids[5] = 9999
        return {"input_ids": ids, "labels": ids.clone().clamp(max=60)}


@pytest.mark.slow
def test_a_trainers_report_names_the_row_and_the_text_that_was_asked_for(tmp_path):
    trainer = cases.build("trainer", tmp_path, max_steps=10)
    trainer.train_dataset = BadRow()
    policy = nanstop.Policy(on_failure="skip", show_text=True)
    watch = nanstop.watch(trainer, policy=policy, out=tmp_path / "out")
    trainer.train()
    (report,) = watch.incidents
    assert "(row 37 of train)" in render(report)
    assert "9999" in render(report)
    (place,) = {row for one in report.localization.positions for row in [one.sample]}
    assert report.incident.rows.row(place) == 37
    watch.close()
    assert "get_train_dataloader" not in vars(trainer)


SCRIPT = """
import torch
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, row):
        noise = torch.randn(4, generator=torch.Generator().manual_seed(row))
        return noise / (row != 37), noise[:1]

torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for epoch in range(1):
    for rows, targets in DataLoader(Rows(), 8, shuffle=True):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(rows), targets).backward()
        optimizer.step()
"""


def test_a_scripts_report_names_the_row(tmp_path):
    _, news = investigated(tmp_path / "script.py", SCRIPT)
    report = next(one for one in news if isinstance(one, nanstop.Report))
    assert 37 in report.incident.rows.rows
    assert len(report.incident.rows.rows) == 8
    assert " of the data set" in render(report)


NORMALISED = SCRIPT.replace(
    "return noise / (row != 37), noise[:1]",
    "noise = (noise * (row != 37)).numpy()\n"
    "        return torch.from_numpy((noise - noise.mean()) / noise.std()), noise[:1]",
)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_the_line_that_prepares_a_row_is_mended_in_code(tmp_path):
    script = tmp_path / "script.py"
    _, news = investigated(script, NORMALISED)
    report = next(one for one in news if isinstance(one, nanstop.Report))
    shown = render(report)
    assert "give `script.py:12` a value where it has none" in shown
    assert "tried where the numbers are made again" in shown
    change = change_for(report, read)
    (file,) = change.files
    assert "/ (noise.std() or 1)" in file.after
    _, news = investigated(tmp_path / "mended.py", file.after)
    assert not any(isinstance(one, nanstop.Report) for one in news)
    script.write_text(NORMALISED.replace("noise.mean()", "noise.amax()"))
    assert change_for(report, read).stale


class Standardised(Dataset):
    """Row 5 is of one number throughout."""

    def __init__(self, prepare):
        self.prepare, self.asked, self.num = prepare, [], 0

    def __len__(self):
        return 8

    def __getitem__(self, row):
        self.asked.append(row)
        self.num += 1
        values = np.full(6, 3.0, np.float32) if row == 5 else np.arange(6, dtype=np.float32) + row
        return {"x": torch.from_numpy(self.prepare(values))}


def by_deviation(values):
    return (values - values.mean()) / values.std()


def by_torch(values):
    values = torch.from_numpy(values)
    return ((values - values.mean()) / values.std()).numpy()


def with_an_innocent_zero(values):
    share = np.where(
        values > 3.5, 1.0 / (values - values), 0.0
    )  # Inf in each row, and read by none
    return (values - values.mean()) / values.std() + 0.0 * np.nan_to_num(share)


def at_two_lines(values):
    values = values / (values - values[0]).max()
    return values / (values - values[0]).max()


def by_chance(values):
    return values * (np.float32("nan") if random.random() < 0.5 else np.float32(1.0))


@pytest.fixture
def thawed():
    """The collector knows every function, those of a test's module as well."""
    gc.unfreeze()
    yield
    gc.freeze()


def along_an_axis(values):
    table = values.reshape(2, 3)
    return (table - table.mean(axis=1, keepdims=True)) / table.std(axis=1, keepdims=True)


def inverse(values):
    return 1.0 / torch.from_numpy(values).sub(3.0).abs().amax(0, keepdim=True).numpy()


@pytest.mark.parametrize(
    ("prepare", "line", "mended"),
    [
        (by_deviation, "return (values - values.mean()) / values.std()", "by_number:div"),
        (by_torch, "return ((values - values.mean()) / values.std()).numpy()", "guarded:div"),
        (
            with_an_innocent_zero,
            "return (values - values.mean()) / values.std() + 0.0",
            "by_number:div",
        ),
        (along_an_axis, "return (table - table.mean(axis=1, keepdims=True))", "by_array:div"),
        (inverse, "return 1.0 / torch", ""),
        (at_two_lines, "", ""),
        (by_chance, "", ""),
    ],
)
@pytest.mark.filterwarnings("ignore:.*encountered in")
@pytest.mark.usefixtures("thawed")
def test_the_line_that_made_a_row_bad(prepare, line, mended):
    random.seed(2)
    rows = DataRows("the data set")
    data, code = Standardised(prepare), prepare.__code__
    loader = DataLoader(data, batch_size=4)
    rows.follow(loader)
    for batch in loader:
        state = random.getstate(), torch.get_rng_state()
        found = rows.rows_of(batch)
        assert (random.getstate(), torch.get_rng_state().tolist()) == (state[0], state[1].tolist())
        bad = not bool(batch["x"].isfinite().all())
        told = found.unmade_at.text if found.unmade_at is not None else ""
        assert (line in told and bool(told)) if bad and line else not told
        assert found.mended_as == (mended if bad else "")
    assert data.num == 8
    assert prepare.__code__ is code
    rows.end()


def test_the_variable_that_a_data_set_takes_its_rows_of():
    prices = torch.tensor([2.0, 1.0, 0.0, 4.0, 5.0, 6.0])
    returns = prices[1:] / prices[:-1]

    class Windows(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, row):
            return {"x": returns[row : row + 2]}

    rows, loader = DataRows("the data set"), DataLoader(Windows(), batch_size=4)
    rows.follow(loader)
    found = rows.rows_of(next(iter(loader)))
    assert found.unmade_at.text == "returns = prices[1:] / prices[:-1]"
    rows.end()


def test_rows_of_a_finite_batch_are_not_made_again():
    rows, data = DataRows("the data set"), Standardised(lambda values: values)
    loader = DataLoader(data, batch_size=4)
    rows.follow(loader)
    for batch in loader:
        rows.rows_of(batch)
    assert data.asked == list(range(8))
    rows.end()


def test_a_collator_that_writes_to_rows_is_given_copies():
    held = [{"x": torch.ones(2) * row, "n": torch.tensor(float(row))} for row in range(4)]

    def collate(samples):
        for one in samples:
            one["x"] += 1.0
        count = torch.stack([one["n"] for one in samples])
        return {"x": torch.stack([one["x"] for one in samples]), "weight": 1.0 / count}

    rows, loader = DataRows("the data set"), DataLoader(held, batch_size=4, collate_fn=collate)
    rows.follow(loader)
    found = rows.rows_of(next(iter(loader)))
    assert found.unmade_at.text.startswith('return {"x"')
    assert [float(one["x"][0]) for one in held] == [1.0, 2.0, 3.0, 4.0]
    rows.end()


def with_own_mask(samples, infinity=float("-inf")):
    owner = torch.cat([torch.full((one,), at) for at, one in enumerate(samples)])
    keep = (owner[:, None] == owner[None]).float()
    mask = (1.0 - keep) * float("-inf")
    far = torch.zeros(2).masked_fill(torch.tensor([True, False]), infinity)
    position_ids = torch.cat([torch.arange(one) for one in samples])[None]
    return {"mask": mask[None, None], "far": far, "position_ids": position_ids}


@pytest.mark.usefixtures("thawed")
def test_the_line_that_made_a_mask_of_packed_rows_bad():
    """It has no rows of its own. An infinity that a mask is to hold has its value."""
    rows, loader = (
        DataRows("the data set"),
        DataLoader([2, 3], batch_size=2, collate_fn=with_own_mask),
    )
    rows.follow(loader)
    found = rows.rows_of(next(iter(loader)))
    assert found.unmade_at.text == 'mask = (1.0 - keep) * float("-inf")'
    assert found.mended_as == ""
    rows.end()


@pytest.mark.usefixtures("thawed")
def test_a_product_with_an_infinity_is_mended_by_a_finite_number():
    rows = DataRows("the data set")
    loader = DataLoader([2, 3], batch_size=2, collate_fn=partial(with_own_mask, infinity=-1e9))
    rows.follow(loader)
    assert rows.rows_of(next(iter(loader))).mended_as == "1e4"
    rows.end()


class Fetching:
    """Counts what it is entered for, and what it is told of."""

    def __init__(self):
        self.fetch, self.entered, self.told = self, 0, 0

    def __enter__(self):
        self.entered += 1

    def __exit__(self, *_):
        pass

    def delivered(self, batch):
        self.told += len(batch)


class Streamed(IterableDataset):
    def __iter__(self):
        return iter(torch.ones(8, 2))


@pytest.mark.parametrize(("data", "is_cut"), [(torch.ones(8, 2), True), (Streamed(), False)])
def test_only_a_fetch_of_rows_that_can_be_made_again_is_cut_short(data, is_cut):
    rows, tape = DataRows("train"), Fetching()
    rows.tape_now = lambda: tape
    loader = DataLoader(data, batch_size=2)
    rows.follow(loader)
    assert len(list(loader)) == 4
    assert tape.told == 4
    assert (tape.entered > 0) is is_cut
    rows.end()
