"""llama.cpp: sequence states and slot files to handovers and back. Free of the engine; Slots talks to one that runs.

    handover = export_slot_file(path.read_bytes(), model=Model("smollm2", 30, 3, 64))
    path.write_bytes(import_slot_file(handover, model=model, like=saved))

docs/handover.md has the path between engines.
"""

from kvx.adapters.llama_cpp.handover import export_slot_file, export_state, import_slot_file, import_state
from kvx.adapters.llama_cpp.kinds import Model, StateKind
from kvx.adapters.llama_cpp.slots import Slots

__all__ = ["Model", "Slots", "StateKind", "export_slot_file", "export_state", "import_slot_file", "import_state"]
