"""The served page: for this machine alone, under an address that is kept and not guessed."""

import json
import socket
import stat
import sys
from urllib.parse import urlsplit

import pytest

from incident_records import report
from nanstop.cli import main
from nanstop.commands.view.view import ADDRESS
from nanstop.store.incidents import Store
from nanstop.store.live_file import WANTED
from nanstop.store.summary import Summary, summary_row
from view_server import ask, served

pytest.importorskip("starlette", reason="pip install nanstop[live]")
pytest.importorskip("uvicorn", reason="pip install nanstop[live]")


def test_the_page_is_served_to_who_knows_its_address(tmp_path):
    with served(tmp_path) as address:
        parts = urlsplit(address)
        assert parts.hostname == "127.0.0.1"
        assert len(parts.path.strip("/")) == 32
        status, headers, page = ask(address)
        assert (status, headers["cache-control"]) == (200, "no-store")
        assert headers["referrer-policy"] == "no-referrer"
        assert parts.path.rstrip("/") in page
        for path in ("/", "/events", "/x/", f"{parts.path}../", f"/{'a' * 32}/"):
            assert ask(address, path=path)[0] == 404
        assert ask(address, host="evil.example")[0] == 400
        assert ask(address, host="localhost")[0] == 200
        assert ask(address, path=f"{parts.path}report/run-0")[0] == 404
        private = stat.S_IMODE((tmp_path / ADDRESS).stat().st_mode)
        assert private == 0o600


def test_a_report_is_served_whole(tmp_path):
    store = Store(tmp_path)
    store.open_incident()
    store.write_report(report())
    store.write_summary(Summary(incidents=(summary_row(report()),), steps=1))
    with served(tmp_path) as address:
        base = urlsplit(address).path
        with_events = ask_events(address)
        assert "error[NS201]" in with_events
        status, _, page = ask(address, path=f"{base}report/run-0")
    assert status == 200
    assert '<h2 id="incident-0">' in page


def ask_events(address):
    """The first events, up to the mark that ends a round."""
    parts = urlsplit(address)
    with socket.create_connection((parts.hostname, parts.port), timeout=60) as one:
        one.sendall(f"GET {parts.path}events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        found = b""
        while b": still here" not in found:
            found += one.recv(65536)
    return found.decode()


def test_the_address_outlives_the_server(tmp_path):
    with served(tmp_path) as first:
        assert (tmp_path / WANTED).exists() or ask_events(first)
        with served(tmp_path) as beside:
            assert beside != first
    assert not (tmp_path / WANTED).exists()
    with served(tmp_path) as again:
        assert again == first


@pytest.mark.skipif(sys.platform == "win32", reason="files there have no such modes")
def test_an_address_that_others_could_read_is_not_used_again(tmp_path):
    token = "a" * 32
    (tmp_path / ADDRESS).write_text(json.dumps({"token": token, "port": 1}))
    (tmp_path / ADDRESS).chmod(0o644)
    with served(tmp_path) as address:
        assert token not in address


def test_a_port_that_is_taken_is_said(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["view", str(tmp_path), "--port", str(taken.getsockname()[1])]) == 2
    assert "cannot be used" in capsys.readouterr().err


def test_without_the_libraries_it_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("nanstop.commands.view.view.find_spec", lambda _: None)
    assert main(["view", str(tmp_path)]) == 2
    assert "pip install nanstop[live]" in capsys.readouterr().err
    assert main(["run", "--live", "--out", str(tmp_path), "true"]) == 2
    assert "pip install nanstop[live]" in capsys.readouterr().err
