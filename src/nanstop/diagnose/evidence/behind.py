"""What is said of tensors whose gradients are zeros because of one operation before them."""

from __future__ import annotations

from nanstop.diagnose.evidence.rule import Reason
from nanstop.records import GradientPath
from nanstop.wording import counted, listed


def part_behind(path: GradientPath) -> Reason | None:
    """Return why gradients come with one operation passed by, None where none does."""
    if not path.behind:
        return None
    cause = (
        f"{counted(len(path.behind), 'tensor')} that the optimizer holds got gradients of zeros or "
        f"roundings alone in the first updates: {listed(path.behind)}; with one operation passed "
        "by, whose derivative is 0, they get others"
    )
    is_all = len(path.behind) == path.num_tensors
    if path.is_own:
        title = (
            "all that is trained is compared with itself"
            if is_all
            else "a part is compared with itself"
        )
        advice = "detach the side that is to stay: a - b.detach(); a number over itself is 1"
    else:
        title = "all that is trained lies behind a step" if is_all else "a part lies behind a step"
        advice = "pass the gradient by: x + (torch.round(x) - x).detach()"
    told = f"{path.flat_at}  {advice}".strip()
    return Reason("likely", title, cause, told, trains_nothing=is_all)
