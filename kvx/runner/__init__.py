"""A small engine on KVX: Llama, Qwen2, Qwen3 and SmolLM, many prompts at once, one paged cache."""

from kvx.runner.engine import Answer, Engine
from kvx.runner.handover import export_sequence, import_sequence, resume
from kvx.runner.open import small_model
from kvx.runner.request import Params, Piece

__all__ = ["Answer", "Engine", "Params", "Piece", "export_sequence", "import_sequence", "resume", "small_model"]
