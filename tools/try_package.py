"""What an installed nanstop must do by itself:
import from its wheel, explain in both languages, watch a loop, tell a NaN.
"""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import nanstop

LOOP = """
import torch
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(3):
    loss = net(torch.ones(2, 4) * (float("nan") if step == 2 else 1.0)).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def main() -> None:
    """Raise where something is missing from the package."""
    assert "site-packages" in Path(nanstop.__file__).parts, nanstop.__file__
    for lang in ("en", "zh"):
        assert "NS201" in nanstop.explain("NS201", lang=lang)
    with TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(LOOP)
        command = [sys.executable, "-m", "nanstop", "run", "--on-failure", "observe", "train.py"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert "error[NS204]" in done.stderr, done.stderr
    sys.stdout.write(f"nanstop {nanstop.__version__} works as installed\n")


if __name__ == "__main__":
    main()
