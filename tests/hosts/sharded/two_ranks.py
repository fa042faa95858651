"""Starts the ranks of a small run, watched or not, and ends them all after a time.

``python two_ranks.py`` reads the names of files of jobs, a line each, and says when one is done:
torch is imported once, each rank is a fork of that process.
"""

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
DRIFTING = ("drifts", "joins", "drifting_accelerated", "drifting_trainer")
FILES = {"parallel": "parallel_programs.py"} | dict.fromkeys(DRIFTING, "drifting_programs.py")
"""Where programs are; all others are in ``rank_programs``."""
TRAINERS = ("trainer", "sharded_trainer", "trainer_engine", "sft", "dpo", "drifting_trainer")
"""Programs that train by a Trainer of transformers."""
IMPORTED_ONCE = (
    *("torch._dynamo", "torch.distributed.checkpoint", "pydantic", "yaml"),
    *("jinja2", "markdown_it", "pygal"),
    *("nanstop.process.inject.start", "nanstop.hosts.loop.controller", "nanstop.session.factory"),
    *(
        "nanstop.session.failing.failures",
        "nanstop.report.text.terminal",
        "nanstop.report.html.run_record",
    ),
    "nanstop.report.html.page",
)
"""What a training, and what is told of a failure, would import in each rank."""
SECONDS = 300
"""After which ranks that have not ended are killed, and told as hung."""


def run(folder, program, *args, **options):
    """Run a program on some ranks, see ``job``.

    Return the exit code of each ("hung" for one that was killed), what each has put into its
    ``result``, and what was written on stderr.
    """
    (ended,) = run_each([job(folder, program, *args, **options)])
    return ended


def job(folder, program, *args, world=2, watched=True, seconds=SECONDS, **variables):
    """Return what ``run_each`` needs to know of a run, in a ``folder`` of its own."""
    folder.mkdir()
    return {
        "program": program,
        "args": args,
        "world": world,
        "watched": watched,
        "seconds": seconds,
        "folder": str(folder),
        "variables": variables,
    }


def run_each(jobs):
    """Run some jobs one after the other, and return of each what ``run`` does."""
    listed = Path(jobs[0]["folder"], "jobs.json")
    listed.write_text(json.dumps(jobs))
    parent = _parent()
    parent.stdin.write(f"{listed}\n")
    parent.stdin.flush()
    seconds = sum(job["seconds"] for job in jobs) + 60
    answered, _, _ = select.select([parent.stdout], [], [], seconds)
    said = parent.stdout.readline() if answered else "nothing in time"
    if said != "done\n":
        end()
        raise RuntimeError(f"the parent of the ranks said {said!r}")
    return [_ended(Path(job["folder"]), job["world"]) for job in jobs]


@cache
def _parent():
    """Start the process that ranks are forks of; ``end`` ends it."""
    return subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def end():
    """End the parent of the ranks, if there is one."""
    if _parent.cache_info().currsize:
        with _parent() as parent:
            parent.stdin.close()
            parent.kill()
        _parent.cache_clear()


def _ended(folder, world):
    codes = json.loads((folder / "codes.json").read_text())
    files = [folder / f"result-{rank}.json" for rank in range(world)]
    results = [json.loads(file.read_text()) if file.exists() else None for file in files]
    return codes, results, (folder / "stderr").read_text()


def incidents(folder):
    """Return the rows of the summary and the reports of a run."""
    rows = json.loads((folder / "out" / "summary.json").read_text())["incidents"]
    reports = [
        json.loads((folder / "out" / row["folder"] / "report.json").read_text()) for row in rows
    ]
    return rows, reports


def _rank(job, rank, port):
    """Be one rank: never returns."""
    code = 70
    try:
        os.chdir(job["folder"])
        told = os.open("stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(told, 1)
        os.dup2(told, 2)
        os.environ.update(job["variables"])
        if job["world"] > 1:
            known = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port}
            known |= {"WORLD_SIZE": job["world"], "LOCAL_WORLD_SIZE": job["world"]}
            os.environ.update({name: str(value) for name, value in known.items()})
            os.environ["MASTER_ADDR"] = "127.0.0.1"
        os.environ["NANSTOP_DIR"] = str(Path(job["folder"], "out"))
        if job["watched"]:
            from nanstop.process.inject.start import start

            if job["program"] in TRAINERS:  # as after the import that `nanstop run` waits for
                import transformers.trainer  # noqa: F401
            start()
        script = HERE / FILES.get(job["program"], "rank_programs.py")
        sys.argv = [str(script), job["program"], *job["args"]]
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
            code = 0
        except BaseException as error:
            traceback.print_exc()
            code = 3 if type(error).__name__ == "TrainingStopped" else 1
        if job["watched"]:
            from nanstop.hosts.script import autowatch

            autowatch.unwatch()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main():
    """Be the parent of the ranks of some jobs."""
    import torch

    for name in IMPORTED_ONCE:
        importlib.import_module(name)
    torch.set_num_threads(1)
    gc.freeze()  # what was imported stays; each rank collects at its end
    for line in sys.stdin:
        for one in json.loads(Path(line.strip()).read_text()):
            codes = _run_ranks(one)
            Path(one["folder"], "codes.json").write_text(json.dumps(codes))
        print("done", flush=True)  # noqa: T201


def _run_ranks(job):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = {}
    for rank in range(job["world"]):
        pid = os.fork()
        if pid == 0:
            _rank(job, rank, port)
        children[pid] = rank
    codes, until = ["hung"] * job["world"], time.monotonic() + job["seconds"]
    while children and time.monotonic() < until:
        pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        if pid and os.WIFSTOPPED(status):
            codes[children[pid]] = "stopped"
        elif pid:
            codes[children.pop(pid)] = os.waitstatus_to_exitcode(status)
        elif all(codes[rank] == "stopped" for rank in children.values()):
            break
        else:
            time.sleep(0.02)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return codes


if __name__ == "__main__":
    main()
