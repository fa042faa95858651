"""The pages of the findings, by code or by name, in English and in Chinese."""

from __future__ import annotations

from dataclasses import dataclass

from nanstop.diagnose import catalogue
from nanstop.diagnose.evidence.rule import Rule
from nanstop.errors import unknown
from nanstop.language.choice import LANGUAGES

UNTRANSLATED = "本页尚未翻译，以下是英文原文。"
"""All that a Chinese page holds until somebody has written it."""


@dataclass(frozen=True, slots=True)
class Page:
    """A finding in one language: its title, and its page as Markdown without a first heading."""

    title: str
    text: str


def find_rule(code: str) -> Rule:
    """Return the rule of a code ("NS201", in any case) or of a name ("fp16-overflow").

    Errors: ``NanstopError`` NS001 for one that does not exist, with the nearest.
    """
    for rule in catalogue.CATALOGUE:
        if code.upper() == rule.code or code.lower() == rule.slug:
            return rule
    names = [name for rule in catalogue.CATALOGUE for name in (rule.code, rule.slug)]
    raise unknown("finding", code.upper() if code[:2].upper() == "NS" else code, names)


_USAGE_ERROR = {
    "en": """# NS001 usage-error: nanstop was asked for what it cannot do

An option, a file, a name or a value is not what nanstop takes. The message says which, and behind
`help:` stands the nearest one that exists, or what to do. It is no failure of a training: nothing
was run, and nothing was changed. The exit code is 2.
""",
    "zh": """# NS001 usage-error: nanstop 无法按要求执行

某个选项、文件、名称或取值不是 nanstop 所接受的。错误信息会说明是哪一个，
`help:` 之后给出最接近的有效名称或处理办法。这不是训练故障：
没有运行任何东西，也没有改动任何东西。退出码为 2。
""",
}


def usage_error(lang: str = "en") -> str:
    """Return the page of NS001, which is no finding. Errors: as ``page``."""
    if lang not in LANGUAGES:
        raise unknown("language", lang, LANGUAGES)
    return _USAGE_ERROR[lang]


def page(rule: Rule, lang: str = "en") -> Page:
    """Return the page of a rule: its docstring in English, ``diagnose/zh/CODE.md`` in Chinese.

    One that is not translated yet says so and goes on in English. Errors: ``NanstopError`` NS001
    for a language that is not in ``LANGUAGES``.
    """
    if lang not in LANGUAGES:
        raise unknown("language", lang, LANGUAGES)
    if lang == "en":
        return Page(rule.title, rule.page.strip())
    from importlib.resources import files

    file = files(catalogue.__name__.rpartition(".")[0]) / lang / f"{rule.code}.md"
    heading, _, text = file.read_text(encoding="utf-8").partition("\n")
    text = text.strip()
    if text == UNTRANSLATED:
        text = f"{text}\n\n{rule.page.strip()}"
    return Page(heading.partition(": ")[2], text)


def explain(code: str, *, lang: str = "en") -> str:
    """Return the page of a finding as Markdown, headed by its code and name.

    Errors: those of ``find_rule`` and of ``page``. The language is never guessed from the locale.
    """
    rule = find_rule(code)
    found = page(rule, lang)
    return f"# {rule.code} {rule.slug}: {found.title}\n\n{found.text}\n"
