"""What is written beside saved weights, and what of the user's stays."""

import pytest

import nanstop
from nanstop.errors import NanstopError
from nanstop.records import Atom
from nanstop.store.beside_weights import CARD, PLAN, plan_beside, write_beside

ISLAND = Atom(remedy="island", target="a.b", value="float32")
OTHER = Atom(remedy="island", target="c", value="float32")
RATE = Atom(remedy="lr", value="0.5")


def test_the_plan_is_that_of_the_run(tmp_path):
    write_beside(tmp_path, (ISLAND, RATE))
    assert plan_beside(tmp_path).remedies == (ISLAND, RATE)
    assert nanstop.load_plan(tmp_path).record == nanstop.load_plan(tmp_path / PLAN).record
    assert not (tmp_path / CARD).exists()


@pytest.mark.parametrize(("atoms", "says"), [((ISLAND, RATE), True), ((RATE,), False)])
def test_a_plan_says_how_the_weights_beside_it_are_loaded(tmp_path, atoms, says):
    write_beside(tmp_path, atoms)
    head = [line for line in (tmp_path / PLAN).read_text().splitlines() if line.startswith("#")]
    assert any("nanstop.load_plan(FOLDER).apply(model)" in line for line in head) == says
    assert any("nanstop export FOLDER --out NEW" in line for line in head) == says


@pytest.mark.parametrize("own", ["# My model\n", "---\ntags: [a]\n---\n\nText", "", "caf\udce9\n"])
def test_a_card_keeps_every_byte_of_its_author(tmp_path, own):
    data = own.encode("utf-8", "surrogateescape")
    (tmp_path / CARD).write_bytes(data)
    for atoms in ((ISLAND,), (ISLAND, OTHER), (ISLAND, OTHER)):
        write_beside(tmp_path, atoms)
    found = (tmp_path / CARD).read_bytes()
    assert found.startswith(data)
    assert found.count(b"nanstop: begin") == 1
    assert b"keep `a.b` and `c` in float32" in found


def test_what_an_author_wrote_behind_the_section_stays(tmp_path):
    (tmp_path / CARD).write_text("# My model\n")
    write_beside(tmp_path, (ISLAND,))
    with (tmp_path / CARD).open("a") as card:
        card.write("\n## Licence\n")
    write_beside(tmp_path, (OTHER,))
    text = (tmp_path / CARD).read_text()
    assert "# My model" in text
    assert "## Licence" in text
    assert "`a.b`" not in text


def test_a_card_is_left_alone_where_loading_needs_nothing(tmp_path):
    (tmp_path / CARD).write_text("# My model\n")
    write_beside(tmp_path, (RATE,))
    assert (tmp_path / CARD).read_text() == "# My model\n"


def test_a_folder_without_a_plan_is_said_to_be_one(tmp_path):
    with pytest.raises(NanstopError, match="holds no nanstop-plan"):
        nanstop.load_plan(tmp_path)
