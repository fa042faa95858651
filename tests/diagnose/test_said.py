"""What people say of a failure leads to its finding."""

import pytest

from nanstop.cli import main
from nanstop.diagnose.catalogue import CATALOGUE
from nanstop.diagnose.pages import page
from nanstop.diagnose.said import SAID, findings_said, said_of

CODES = [rule.code for rule in CATALOGUE if rule.code != "NS000"]


def codes(text):
    return [rule.code for rule in findings_said(text)]


def test_people_say_something_of_every_finding():
    assert list(SAID) == CODES


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("code", CODES)
def test_what_is_said_of_a_finding_leads_to_it(code, lang):
    phrases = said_of(code, lang)
    assert phrases
    for phrase in phrases:
        assert code in codes(phrase), phrase
    if lang == "zh":
        assert any("\u4e00" <= each <= "\u9fff" for phrase in phrases for each in phrase)


def test_an_error_within_other_text_leads_to_its_finding():
    text = "Traceback (most recent call last): ... IndexError: index out of range in self"
    assert codes(text)[:1] == ["NS502"]
    assert codes("step 12 died, then: Process finished with exit code 139 (SIGSEGV)")[:1] == [
        "NS601"
    ]


@pytest.mark.parametrize("text", ["", "the weather is fine", "pip install torch", "今天天气很好"])
def test_what_is_no_symptom_leads_nowhere(text):
    assert codes(text) == []


def test_a_line_of_a_log_is_a_symptom_as_it_stands(capsys):
    line = "{'loss': 0.0, 'grad_norm': nan, 'learning_rate': 4.9e-05, 'epoch': 0.1}"
    assert main(["explain", "--symptom", line]) == 0
    pasted = capsys.readouterr().out
    for words in ("loss 0.0, grad_norm nan", "loss is 0.0 and grad_norm is nan"):
        main(["explain", "--symptom", words])
        assert capsys.readouterr().out == pasted
    assert pasted.startswith("NS201")


def test_the_terminal_is_asked_by_an_error_too(capsys):
    assert main(["explain", "--symptom", "exit code 137", "--lang", "zh"]) == 0
    assert capsys.readouterr().out.split() == ["NS601", "process-killed", "进程被信号终止"]
    assert main(["explain", "--symptom", "the weather"]) == 2
    assert "known: loss, grad_norm" in capsys.readouterr().err


def test_titles_are_those_of_pages():
    assert all(page(rule).title for rule in findings_said("loss nan"))
