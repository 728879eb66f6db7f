"""Make the engine of a configuration; each engine's own libraries are imported only for it."""

from __future__ import annotations

from importlib import import_module

from .config import EnginesConfig
from .engine import Engine

_CLASSES = {
    "openai": ("openai.engine", "OpenAIEngine"),
    "llama.cpp": ("llama_cpp.engine", "LlamaCppEngine"),
    "vllm": ("vllm.engine", "VllmEngine"),
}


def create_engine(config: EnginesConfig) -> Engine:
    """Return the engine that `config.engine` names; it has not started."""
    module, name = _CLASSES[config.engine]
    engine: Engine = getattr(import_module(f".{module}", __package__), name)(config)
    return engine
