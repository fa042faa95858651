"""Scripts of Lightning's in processes of their own, as `nanstop run` starts them."""

import json
import os
import subprocess
import sys

from nanstop.store.incidents import load_summary


def ended(folder, source, *words, watched=True):
    """Return what a script said in its last line, the rows of its summary, and its errors."""
    folder.mkdir()
    (folder / "script.py").write_text(source)
    before = ("-m", "nanstop", "run", "--out", "out") if watched else ()
    done = subprocess.run(
        [sys.executable, *before, "script.py", *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = load_summary(folder / "out" / "summary.json").incidents if watched else ()
    return json.loads(done.stdout.splitlines()[-1]), rows, done.stderr
