"""Every immutable record of nanstop: what was seen, what was tried, what was done.

Records are facts. They hold no tensors, only numbers, strings and other records, so that rules, reports and the
command line work without torch and an old incident can be diagnosed anew. ``report.codec`` turns them into JSON and
back (non-finite floats are kept as strings) and publishes their schema.
"""

from __future__ import annotations

from nanstop.records.facts import (
    BatchFact,
    Environment,
    OptimizerFacts,
    ParamGroup,
    RangeRow,
    RunFacts,
    TokenRows,
    UpdateRow,
)
from nanstop.records.incident import (
    Incident,
    Localization,
    Position,
    Replay,
    SnapshotRef,
)
from nanstop.records.probe import CoarseRow, GradientRow, LogitGap, Probe, StateRow
from nanstop.records.values import (
    FORMAT_MAX,
    FailureKey,
    OpEvent,
    Series,
    Signal,
    SourceLine,
    StepId,
    TensorStats,
)
from nanstop.records.verdict import (
    Action,
    Alternative,
    Atom,
    AuditEntry,
    Diagnosis,
    Evidence,
    Proof,
    Reference,
    Report,
    Trial,
)
from nanstop.records.words import (
    CONFIG,
    SCHEMA,
    ActionKind,
    Confidence,
    FailureKind,
    Fidelity,
    Finiteness,
    Origin,
    Outcome,
    Phase,
    Safety,
    SignalSource,
    Verdict,
)

__all__ = [
    "CONFIG",
    "FORMAT_MAX",
    "SCHEMA",
    "Action",
    "ActionKind",
    "Alternative",
    "Atom",
    "AuditEntry",
    "BatchFact",
    "CoarseRow",
    "Confidence",
    "Diagnosis",
    "Environment",
    "Evidence",
    "FailureKey",
    "FailureKind",
    "Fidelity",
    "Finiteness",
    "GradientRow",
    "Incident",
    "Localization",
    "LogitGap",
    "OpEvent",
    "OptimizerFacts",
    "Origin",
    "Outcome",
    "ParamGroup",
    "Phase",
    "Position",
    "Probe",
    "Proof",
    "RangeRow",
    "Reference",
    "Replay",
    "Report",
    "RunFacts",
    "Safety",
    "Series",
    "Signal",
    "SignalSource",
    "SnapshotRef",
    "SourceLine",
    "StateRow",
    "StepId",
    "TensorStats",
    "TokenRows",
    "Trial",
    "UpdateRow",
    "Verdict",
]
