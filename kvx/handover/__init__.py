"""What one engine hands to another: a sequence's tokens, K and V in neutral blocks, states, a manifest, a content digest."""

from kvx.handover.facts import NEUTRAL, NEUTRAL_LATENT
from kvx.handover.handover import Handover, from_manifest
from kvx.handover.in_tiers import find, keep, names, part_kind
from kvx.handover.joined import join
from kvx.handover.part import Part
from kvx.handover.saved import load, save
from kvx.handover.source import Source, export_blocks
from kvx.identity import model_name

__all__ = [
    "NEUTRAL",
    "NEUTRAL_LATENT",
    "Handover",
    "Part",
    "Source",
    "export_blocks",
    "find",
    "from_manifest",
    "join",
    "keep",
    "load",
    "model_name",
    "names",
    "part_kind",
    "save",
]
