"""What is counted for as long as the sidecar runs, from the lead rank's records."""

from ultraep_serve.observability.savings import avoided_seconds, savings
from ultraep_serve.observability.schema import RecordArray
from ultraep_serve.observability.snapshot import imbalances
from ultraep_serve.observability.window import Window
from ultraep_serve.sidecar.histogram import ImbalanceHistogram
from ultraep_serve.sidecar.timeline import Timeline

__all__ = ["Tally"]


class Tally:
    """Imbalances and estimated seconds; every record counts once, whichever rank leads."""

    def __init__(self, timeline: Timeline) -> None:
        """What is counted here is passed on to ``timeline``."""
        self._timeline = timeline
        self.before = ImbalanceHistogram()
        self.after = ImbalanceHistogram()
        self.saved_seconds = 0.0
        self.worsened_seconds = 0.0  # of layers whose busiest rank was given more
        self._last = (0, 0, 0)  # wall clock, batch and layer of the last record counted

    def observe(self, records: RecordArray, started_ns: int) -> None:
        """Count those of the lead's ``records`` that come after the last one counted.

        All ranks number batches alike, so a new lead repeats what the old one said. A writer that
        began (``started_ns``, wall clock) after the last record belongs to a new run.
        """
        time_ns, batch, layer = self._last
        if started_ns <= time_ns:
            later = (records["batch"] == batch) & (records["layer"] > layer)
            records = records[later | (records["batch"] > batch)]
        if not len(records):
            return
        last = records[-1]
        self._last = (int(last["time_ns"]), int(last["batch"]), int(last["layer"]))
        self._timeline.add_batches(records)
        weighed = Window().weighed(records)
        if len(weighed):
            self._count(weighed)

    def _count(self, records: RecordArray) -> None:
        self.before.count(imbalances(records["load_before"]))
        self.after.count(imbalances(records["load_after"]))
        self._timeline.add(records)
        estimate = savings(avoided_seconds(records), spent=0.0)
        self.saved_seconds += estimate.saved_seconds
        self.worsened_seconds += estimate.spent_seconds
