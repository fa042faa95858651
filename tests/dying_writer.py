"""A process that writes incidents, a summary and a flight file without end, to be killed at any
moment.
"""

import itertools
from dataclasses import replace

from incident_records import report
from nanstop.process.crash.flight_file import FlightFile
from nanstop.store.incidents import Store
from nanstop.store.summary import Summary, summary_row


def write_without_end(folder, flight):
    """Open an incident, write it three times with a growing count, name it in the summary;
    and note operations.
    """
    store = Store(folder, "r")
    file = FlightFile(flight, num_ops=16)
    rows = []
    for step in itertools.count():
        incident_id, _ = store.open_incident()
        for count in (1, 2, 3):
            told = replace(report(incident_id), count=count)
            store.write_report(told)
            store.write_summary(Summary(incidents=(*rows[-4:], summary_row(told)), steps=step))
            for _ in range(5):
                name = f"op{file._num_ops_seen + 1}"
                file.done(file.op("forward", name, name, f"{name}.py:1 f", [("float32", (step,))]))
        rows.append(summary_row(told))
        file.step(step)
