"""See a cache while it works, in a browser or later from a recording.

with kvx.view.attach(cache) as view:         # a page at view.url, and /metrics
    view.record("run.jsonl")
with kvx.view.record(cache, "run.jsonl"):    # the recording alone

watcher.py looks and reasons.py says why a prefix ended; picture.py has what changed as records, of which recordings, the page and
metrics are made.
"""

from kvx.view.attach import BrowserView, attach
from kvx.view.recording import Recording, RecordingReader, record

__all__ = ["BrowserView", "Recording", "RecordingReader", "attach", "record"]
