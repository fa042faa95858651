"""The live file: whole lines only, one training at a time, and written while somebody asks."""

import os

import pytest

from nanstop.store.live_file import LIVE, WANTED, LiveFile, LiveLines, Wish


def test_lines_are_read_once_and_only_whole(tmp_path):
    file, lines = LiveFile(tmp_path, {"host": "loop"}), LiveLines(tmp_path)
    file.append({"step": 1})
    (header, first), begun = lines.new()
    assert (header["host"], first["step"], begun) == ("loop", 1, True)
    with (tmp_path / LIVE).open("a") as stream:
        stream.write('{"step":2,"ser')
    assert lines.new() == ([], False)
    with (tmp_path / LIVE).open("a") as stream:
        stream.write('ies":{}}\nnot of ours\n[1]\n')
    assert lines.new() == ([{"step": 2, "series": {}}], False)
    file.close()


def test_another_training_is_told_from_its_first_line(tmp_path):
    lines = LiveLines(tmp_path)
    for host in ("first", "second"):
        file = LiveFile(tmp_path, {"host": host})
        file.append({"step": 7})
        found, begun = lines.new()
        assert ([one.get("host") for one in found], begun) == ([host, None], True)
        file.close()


def test_numbers_that_are_not_finite_come_through(tmp_path):
    file = LiveFile(tmp_path, {})
    file.append({"series": {"loss_raw": [[3, float("nan")], [4, float("-inf")]]}})
    file.close()
    (_, line), _ = LiveLines(tmp_path).new()
    assert str(line["series"]["loss_raw"]) == "[[3, nan], [4, -inf]]"


@pytest.mark.parametrize("made", ["missing", "link", "folder"])
def test_what_is_no_plain_file_is_not_read(made, tmp_path):
    if made == "link":
        (tmp_path / "secret").write_text('{"step":1}\n')
        (tmp_path / LIVE).symlink_to(tmp_path / "secret")
    elif made == "folder":
        (tmp_path / LIVE).mkdir()
    assert LiveLines(tmp_path).new() == ([], False)


def test_a_wish_that_is_not_renewed_fades(tmp_path):
    wish, followed = Wish(tmp_path), Wish(tmp_path)
    assert not followed.is_fresh(0.0)
    wish.renew()
    assert followed.is_fresh(1.0)
    assert followed.is_fresh(60.0)
    assert not followed.is_fresh(62.0)
    os.utime(tmp_path / WANTED, ns=(1, 1))  # by a machine whose clock is years behind
    assert followed.is_fresh(63.0)
    wish.drop()
    assert not followed.is_fresh(64.0)
