"""The Chinese pages say what the English ones say:
held to their sections, code, links, numbers, costs and names.
"""

import re
import sys
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import pytest

from diagnose.test_conformance import HEADINGS
from nanstop.diagnose import pages
from nanstop.diagnose.catalogue import CATALOGUE
from nanstop.errors import NanstopError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "nanstop"
FOLDER = PACKAGE / "diagnose" / "zh"
CHINESE_HEADINGS = (
    "发生了什么",
    "为什么会发生",
    "示例",
    "如何修复",
    "修复的安全性",
    "请勿与以下情况混淆",
    "参考资料",
)
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"https?://\S+")
CODE = re.compile(r"`[^`]+`")
NUMBER = re.compile(r"(?<![A-Za-z\d.])\d[\d.]*(?:e[+-]?\d+)?")
HAN = re.compile(r"[\u4e00-\u9fff]")
LATIN = re.compile(r"[A-Za-z]{2,}")


def is_translated(rule):
    """Whether its Chinese page is more than the mark that it is still to be written."""
    return not pages.page(rule, "zh").text.startswith(pages.UNTRANSLATED)


TRANSLATED = [rule for rule in CATALOGUE if is_translated(rule)]
each_rule = pytest.mark.parametrize("rule", TRANSLATED, ids=lambda rule: rule.code)


def both(rule):
    """The English and the Chinese page."""
    return pages.page(rule, "en").text, pages.page(rule, "zh").text


def sections(page):
    """What stands before the first heading, then each heading with its text."""
    first, *parts = re.split(r"^## (.+)$", page, flags=re.MULTILINE)
    return first, dict(zip(parts[::2], parts[1::2], strict=True))


def prose(text):
    """The text without blocks of code, links and inline code."""
    return CODE.sub(" ", LINK.sub(" ", BLOCK.sub("", text)))


def inline_code(text):
    return {" ".join(each.split()) for each in CODE.findall(BLOCK.sub("", text))}


def numbers(text):
    return {each.rstrip(".") for each in NUMBER.findall(prose(text))}


def is_chinese(paragraph):
    """Whether Chinese characters outweigh Latin words;
    a name of a finding or of a number format is no sentence.
    """
    words = [word for word in LATIN.findall(paragraph) if not word.startswith("NS")]
    longest = max(map(len, re.findall(r"(?:[A-Za-z]+[ ,]+){4,}[A-Za-z]+", paragraph)), default=0)
    return len(HAN.findall(paragraph)) > 1.5 * len(words) and not longest


def test_every_finding_has_a_page_and_no_other_does():
    assert sorted(path.name for path in FOLDER.iterdir()) == [f"{r.code}.md" for r in CATALOGUE]


@pytest.mark.parametrize("rule", CATALOGUE, ids=lambda rule: rule.code)
def test_page_is_translated(rule):
    if not is_translated(rule):
        pytest.skip(f"{rule.code} has no Chinese page yet, and says so")


@pytest.mark.parametrize("rule", CATALOGUE, ids=lambda rule: rule.code)
def test_heading_names_the_finding_and_its_title_is_chinese(rule):
    heading = (FOLDER / f"{rule.code}.md").read_text(encoding="utf-8").splitlines()[0]
    title = pages.page(rule, "zh").title
    assert heading == f"# {rule.code} {rule.slug}: {title}"
    assert HAN.search(title)
    assert not title.endswith("。")


@each_rule
def test_same_sections_in_the_same_order(rule):
    (english_first, english), (chinese_first, chinese) = map(sections, both(rule))
    assert tuple(english) == HEADINGS
    assert tuple(chinese) == CHINESE_HEADINGS
    assert english_first.strip()
    assert chinese_first.strip()
    assert all(text.strip() for text in chinese.values())


@each_rule
def test_same_code_links_and_findings(rule):
    english, chinese = both(rule)
    assert BLOCK.findall(chinese) == BLOCK.findall(english)
    assert LINK.findall(chinese) == LINK.findall(english)
    for ours, theirs in zip(each_section(chinese), each_section(english), strict=True):
        assert inline_code(ours) == inline_code(theirs)
        assert named(ours) == named(theirs)


def each_section(page):
    first, rest = sections(page)
    return first, *rest.values()


def named(text):
    return Counter(re.findall(r"NS\d{3}", prose(text)))


@each_rule
def test_same_numbers(rule):
    english, chinese = both(rule)
    for ours, theirs in zip(each_section(chinese), each_section(english), strict=True):
        assert numbers(theirs) <= numbers(ours)
        invented = numbers(ours) - numbers(theirs)
        assert {each for each in invented if len(each) > 1} == set()


@each_rule
def test_as_many_fixes_with_as_many_costs(rule):
    (_, english), (_, chinese) = map(sections, both(rule))
    theirs, ours = steps(english["Fix"]), steps(chinese["如何修复"])
    assert [each.count("代价：") for each in ours] == [each.count("Cost:") for each in theirs]
    assert all(ours)


def steps(text):
    return re.split(r"^\d+\. ", text, flags=re.MULTILINE)[1:]


@each_rule
def test_no_paragraph_is_left_in_english(rule):
    _, chinese = both(rule)
    assert not [each for each in paragraphs(chinese) if not is_chinese(each)]


def paragraphs(page):
    """Every line of prose: the Chinese pages have a paragraph a line, since a line's end is a
    blank when rendered.
    """
    lines = [line.strip("#-0123456789. ") for line in prose(page).splitlines()]
    return [line for line in lines if line]


@pytest.mark.parametrize("rule", CATALOGUE[:3], ids=lambda rule: rule.code)
def test_an_english_page_would_be_noticed(rule):
    assert not all(map(is_chinese, paragraphs(pages.page(rule, "en").text)))
    assert not is_chinese("Clipping multiplies every gradient 裁剪")
    assert not is_chinese(
        "损失是有限的。在反向传播中 an operation got finite inputs, "
        "输出却是不对的，换用更宽的格式就有限"
    )


@each_rule
def test_signs_are_chinese_and_each_paragraph_is_a_line(rule):
    _, chinese = both(rule)
    text = prose(chinese)
    assert not re.search(r"[\u4e00-\u9fff][,;:?!()]|[,;:?!()][\u4e00-\u9fff]", text)
    assert not re.search(r"[\u4e00-\u9fff][A-Za-z\d]|[A-Za-z\d][\u4e00-\u9fff]", text)
    assert not re.search(r"[，。；：、）（] | [，。；：、）（]", CODE.sub("x", chinese))
    for section in each_section(text):
        assert not re.search(r"[^\n]\n(?!\d+\. |-|\n)", section.strip())


def test_a_language_that_is_not_there():
    with pytest.raises(NanstopError, match="unknown language: `de`"):
        pages.explain("NS201", lang="de")


def test_whatever_the_package_reads_is_in_the_wheel():
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = setup["tool"]["setuptools"]["package-data"]["nanstop"]
    data = [
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and path.suffix not in {".py", ".pyc"}
    ]
    assert "diagnose/zh/NS201.md" in data
    assert [each for each in data if not any(fnmatch(each, one) for one in patterns)] == []
