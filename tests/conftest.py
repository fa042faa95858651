"""Shared set-up: one thread (tiny models are slower on two), no network, a fresh place for
incidents.
"""

import gc
import itertools
import os
import signal
import sys

import pytest

from versions import older_than

OLDER_HOSTS = (
    "ignore:None of the inputs have requires_grad",  # TRL 0.24 checkpoints GRPO, reentrantly
    "ignore:Model has `tie_word_embeddings=True`",  # peft 0.18 says so of every head that trains
)
"""What the oldest supported hosts warn of in their own code, whatever a test does."""

os.environ["NANSTOP_LANG"] = "en"  # whatever the locale is
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import tiny  # noqa: E402, F401 - with one thread; before the benchmarks, which have a module of the same name

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background, the suite has interrupts ignored, and every child would inherit
    # that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    if older_than("transformers", "5"):
        for item in items:
            item.add_marker(pytest.mark.filterwarnings(*OLDER_HOSTS))


NUM_FROZEN = pytest.StashKey[int]()
"""How many modules there were when the garbage collector was told to leave what there is."""


def pytest_collection_finish(session):
    """What was imported stays: the garbage collector need not walk it. A Trainer collects twice a
    training, which took a fifth of the suite's time.
    """
    if "hypothesis" in sys.modules:
        _first_example()  # asks the collector who refers to a generator: to a frozen one nobody
    _freeze_imported(session.config)


def _freeze_imported(config):
    """Freeze what there is where many modules were imported since that was done last."""
    if len(sys.modules) >= config.stash.get(NUM_FROZEN, 0) + 50:
        config.stash[NUM_FROZEN] = len(sys.modules)
        gc.collect()
        gc.freeze()


def _first_example():
    from hypothesis import given, settings
    from hypothesis import strategies as st

    settings(max_examples=1, database=None)(given(st.none())(lambda _: None))()


def pytest_sessionfinish():
    gc.unfreeze()  # the summary imports what asks the collector who refers to an object


def pytest_runtest_setup(item):
    """A test's training arguments must not decide on the precision of the next one's: those of
    transformers 4 write it here, and read it where none is asked for. Nor must what it compiled
    keep the looks away from the models of all tests after it.
    """
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
    if "torch._dynamo.utils" in sys.modules:
        sys.modules["torch._dynamo.utils"].counters.clear()
    _freeze_imported(item.config)


@pytest.fixture(scope="session")
def unmade_folders(tmp_path_factory):
    """Incident folders for tests that make no other files, none of which is there yet."""
    base = tmp_path_factory.mktemp("incidents")
    return (base / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def incident_folder(request, unmade_folders, monkeypatch):
    """Each test has an incident folder of its own and no kill switch.

    ``tmp_path`` is of those that ask for it: it is made by a walk through the folders of all tests
    before it.
    """
    if "tmp_path" in request.fixturenames:
        folder = request.getfixturevalue("tmp_path") / "nanstop"
    else:
        folder = next(unmade_folders)
    monkeypatch.setenv("NANSTOP_DIR", str(folder))
    monkeypatch.delenv("NANSTOP", raising=False)
    return folder


@pytest.fixture
def call(capsys):
    """Run a command of nanstop's in this process: (exit code, standard output, standard error)."""
    from nanstop import cli

    def run(*arguments):
        code = cli.main([str(one) for one in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
