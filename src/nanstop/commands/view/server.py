"""The page of followed runs, served to this machine alone under an address that nobody can guess.

Parts that have changed are sent as server-sent events: a browser connects again by itself, and is
told everything anew by whichever server answers then.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from nanstop.commands.view.followed import FollowedRun, run_folders
from nanstop.commands.view.parts import run_parts, shell
from nanstop.report.html.page import html_page
from nanstop.report.html.run_record import run_record
from nanstop.store.incidents import REPORT

HOSTS = ["127.0.0.1", "localhost"]
"""Names under which the page answers: another one may have been made to lead here by a stranger."""
_LOOK_SECONDS = 1.0
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class FollowedRuns:
    """The runs of some folders as parts of a page, looked at once in a second however many ask."""

    def __init__(self, folders: Sequence[Path], base: str) -> None:
        self._folders = folders
        self._base = base
        self._runs: dict[Path, FollowedRun] = {}
        self._keys: dict[Path, str] = {}
        self._parts: dict[str, Mapping[str, str]] = {}
        self._looked = float("-inf")
        self._lock = threading.Lock()

    def parts(self) -> dict[str, Mapping[str, str]]:
        """Return the parts of each run by its key."""
        with self._lock:
            if time.monotonic() - self._looked >= _LOOK_SECONDS:
                self._parts = dict(self._look())
                self._looked = time.monotonic()
            return self._parts

    def report(self, key: str) -> str | None:
        """Return the page of a run's incidents, None where there is none."""
        with self._lock:
            run = next((run for f, run in self._runs.items() if self._keys[f] == key), None)
            reports = run.look().reports if run is not None else ()
        if run is None or not reports:
            return None
        records = [str(run.folder / one.incident.id / REPORT) for one in reports]
        return html_page(run_record(run.folder, reports, records))

    def close(self) -> None:
        """Follow no run any more."""
        for run in self._runs.values():
            run.close()

    def _look(self) -> Any:
        found = run_folders(self._folders)
        for gone in [folder for folder in self._runs if folder not in found]:
            self._runs.pop(gone).close()
        for folder, name in found.items():
            if folder not in self._runs:
                self._runs[folder] = FollowedRun(folder, name)
                self._keys.setdefault(folder, f"run-{len(self._keys)}")
            key = self._keys[folder]
            now, page = self._runs[folder].look(), f"{self._base}/report/{key}"
            yield key, run_parts(now, key, page, is_alone=len(found) == 1)


def application(board: FollowedRuns, base: str, *, is_ending: Callable[[], bool]) -> Any:
    """Return the web application. ``base``: the path that holds the token. ``is_ending``: whether
    those that listen are to be let go.
    """
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route

    async def page(_: Request) -> Response:
        return HTMLResponse(shell(base), headers=_HEADERS)

    async def report(request: Request) -> Response:
        found = await run_in_threadpool(board.report, request.path_params["key"])
        if found is None:
            return PlainTextResponse("no incident yet", status_code=404, headers=_HEADERS)
        return HTMLResponse(found, headers=_HEADERS)

    async def events(_: Request) -> Response:
        told = _told(lambda: run_in_threadpool(board.parts), is_ending)
        return StreamingResponse(told, media_type="text/event-stream", headers=_HEADERS)

    @asynccontextmanager
    async def life(_: Any) -> AsyncIterator[None]:
        yield
        board.close()

    return Starlette(
        routes=[
            Route(f"{base}/", page),
            Route(f"{base}/events", events),
            Route(f"{base}/report/{{key}}", report),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS)],
        lifespan=life,
    )


async def _told(look: Callable[[], Any], is_ending: Callable[[], bool]) -> AsyncIterator[str]:
    """Yield what has changed since it was last told, as events."""
    told: dict[str, str] = {}
    runs: list[str] = []
    while not is_ending():
        found = await look()
        if list(found) != runs:
            runs = list(found)
            yield _event("runs", runs)
        for run, parts in found.items():
            for name, html in parts.items():
                if told.get(name) != html:
                    told[name] = html
                    yield _event("part", {"id": name, "run": run, "html": html})
        yield ": still here\n\n"
        await asyncio.sleep(_LOOK_SECONDS)
    yield _event("bye", None)


def _event(kind: str, value: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps(value)}\n\n"
