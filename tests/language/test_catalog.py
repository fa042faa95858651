"""What nanstop says has a translation, and nothing is translated that it does not say."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from diagnose.test_checks import FIRES
from nanstop.diagnose.catalogue import CATALOGUE
from nanstop.diagnose.diagnose import diagnose
from nanstop.language.catalog import core, sentences
from nanstop.language.translate import translated, untranslated

ROOT = Path(__file__).parents[2]
PLACE = re.compile(r"\{(\d*)\}")
OTHERS_WORDS = re.compile(
    r"index out of range in self|CUDA out of memory|[\w ]+ counted 1 kill|no step for 9 s|"
    r"nll_loss|gpu NVIDIA|1 element negative|m\.py:3 in wait|"
    r"not tied|pixels|allowed|kept|rotary|policy|loop|"
    r"not finite after the update: $"
)
"""What a specimen has of torch, of a system, or as a name."""


def tool():
    path = ROOT / "tools" / "messages.py"
    spec = importlib.util.spec_from_file_location("messages", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MESSAGES = tool()


def test_every_sentence_has_a_translation():
    assert MESSAGES.missing() == {}


def test_no_translation_is_of_a_sentence_that_nothing_says():
    assert MESSAGES.catalog().keys() - MESSAGES.said().keys() == set()


def test_a_sentence_that_is_added_is_missed(tmp_path, monkeypatch):
    file = tmp_path / "errors.py"
    file.write_text('def said(n):\n    return f"a sentence of {n} that nobody knows"\n')
    monkeypatch.setattr(MESSAGES, "SRC", tmp_path)
    monkeypatch.setattr(MESSAGES, "SAID_IN", ("errors.py",))
    MESSAGES.said.cache_clear()
    try:
        assert list(MESSAGES.said()) == ["a sentence of {} that nobody knows"]
        assert MESSAGES.main([]) == 1
    finally:
        MESSAGES.said.cache_clear()


def test_the_cures_of_pages_are_those_of_the_pages():
    told = json.loads(MESSAGES.FROM_PAGES.read_text(encoding="utf-8"))
    assert told == MESSAGES.cures_of_pages(), "python tools/messages.py --pages"
    assert len(told) > len(CATALOGUE) * 0.9


@pytest.mark.parametrize("file", sorted(MESSAGES.CATALOG.glob("*.json")), ids=lambda one: one.stem)
def test_translations_have_the_values_of_their_sentences(file):
    for english, other in json.loads(file.read_text(encoding="utf-8")).items():
        if file == MESSAGES.FROM_PAGES:  # quotes code, braces and all
            continue
        places, num = PLACE.findall(other), english.count("{}")
        assert core(english) == english
        if any(places):
            assert all(places), other
            assert max(map(int, places)) < num, other
        else:
            assert len(places) == num, other


@pytest.mark.parametrize("sentence", sentences("zh"), ids=lambda one: one.english[:40])
def test_a_translation_is_found_again_by_its_sentence(sentence):
    """Whatever its values are, the sentence is read as itself or as a sentence that says more."""
    if sentence.is_joint or not untranslated(sentence.english.replace("{}", "7")):
        return
    text = sentence.english.replace("{}", "7")
    read = translated(text, "zh")
    assert len(untranslated(read)) < len(untranslated(text))


def told(finding):
    texts = (finding.title, finding.cause, *finding.lines, finding.confirmed, finding.usual_cure)
    return [text for text in texts if text and not OTHERS_WORDS.search(text)]


def test_findings_are_chinese_to_the_last_word():
    left, num = [], 0
    for code, specimens in FIRES.items() if isinstance(FIRES, dict) else enumerate(FIRES):
        given = specimens if isinstance(specimens, list | tuple) else [specimens]
        for evidence in (one for one in given if type(one).__name__ == "Evidence"):
            for when in {when for rule in CATALOGUE for when in rule.when}:
                for finding in diagnose(evidence, when):
                    num += 1
                    texts = [translated(text, "zh") for text in told(finding)]
                    left += [
                        (code, text, untranslated(text)) for text in texts if untranslated(text)
                    ]
    assert num > 300
    words = {word for *_, words in left for word in words}
    names = {
        "accelerate",
        "Ampere",
        "Any",
        "beta",
        "item",
        "step",
        "top-p",
        "Triton",
        "with",
        "False",
        "True",
    }
    assert words <= names | {"incident", "island", "clamp"}
