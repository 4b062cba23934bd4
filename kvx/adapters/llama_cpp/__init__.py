"""llama.cpp: sequence states and slot files to handovers and back. Free of the engine; Slots talks to one that runs.

    handover = export_slot_file(path.read_bytes(), model=StateModel("smollm2", 30, 3, 64))
    path.write_bytes(import_slot_file(handover, model=model, like=saved))

docs/handover.md has the path between engines.
"""

from kvx.adapters.llama_cpp.handover import export_slot_file, export_state, import_slot_file, import_state
from kvx.adapters.llama_cpp.kinds import StateKind
from kvx.adapters.llama_cpp.model import LayerRows, StateModel
from kvx.adapters.llama_cpp.recurrent import RecurrentState, read_recurrent, write_recurrent
from kvx.adapters.llama_cpp.slots import Slots

Model = StateModel  # the name that callers before it imported

__all__ = [
    "LayerRows",
    "Model",
    "RecurrentState",
    "Slots",
    "StateKind",
    "StateModel",
    "export_slot_file",
    "export_state",
    "import_slot_file",
    "import_state",
    "read_recurrent",
    "write_recurrent",
]
