"""List the presets of `motet up --preset NAME`: small permissive models by their hub names.

Sizes and licences are those that the hub's pages publish. Memory is that of `motet plan`: weights as
they are computed on a CPU, activations, and 456 MiB for a process; of a language model with the keys
and values of one sequence of 4,096 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from motet_shared.errors import ConfigError

_WIDTH = 140  # without a terminal


@dataclass(frozen=True, slots=True)
class PresetModel:
    """Describe a model.

    flag: of `motet up`, without dashes. parameters: in millions. download, memory: as they are
    shown.
    """

    flag: str
    sense: str
    name: str
    licence: str
    parameters: int
    download: str
    memory: str


@dataclass(frozen=True, slots=True)
class Preset:
    """Name the models of one stack; flags without one stay off."""

    about: str
    models: tuple[PresetModel, ...]

    @property
    def llm(self) -> str:
        """Return the language model."""
        return next(model.name for model in self.models if model.flag == "llm")

    @property
    def flags(self) -> dict[str, Any]:
        """Return the other flags of `motet up`, by name."""
        off = dict.fromkeys(("asr", "tts", "draw", "film", "embed", "rank"), "none")
        return off | {model.flag: model.name for model in self.models if model.flag != "llm"}


_CHAT = PresetModel("llm", "chats", "Qwen/Qwen3-0.6B", "Apache-2.0", 596, "1.5 GB", "2.1 GiB")
_SEES = PresetModel(
    "llm", "sees", "HuggingFaceTB/SmolVLM-256M-Instruct", "Apache-2.0", 256, "0.5 GB", "1.7 GiB"
)
_HEARS = PresetModel("asr", "hears", "openai/whisper-base", "Apache-2.0", 73, "290 MB", "0.7 GiB")
_SPEAKS = PresetModel(
    "tts", "speaks", "gradium/phonon-31m-en", "Apache-2.0", 41, "170 MB", "0.6 GiB"
)
_EMBEDS = PresetModel(
    "embed",
    "embeds",
    "sentence-transformers/all-MiniLM-L6-v2",
    "Apache-2.0",
    23,
    "91 MB",
    "0.5 GiB",
)
_RANKS = PresetModel(
    "rank", "ranks", "cross-encoder/ms-marco-MiniLM-L6-v2", "Apache-2.0", 23, "91 MB", "0.5 GiB"
)
_DRAWS = PresetModel(
    "draw",
    "draws",
    "stable-diffusion-v1-5/stable-diffusion-v1-5",
    "CreativeML OpenRAIL-M",
    1066,
    "5.5 GB",
    "4.4 GiB",
)

PRESETS: dict[str, Preset] = {
    "assistant": Preset("spoken conversations: chat, ears and a voice", (_CHAT, _HEARS, _SPEAKS)),
    "chat": Preset("chat alone", (_CHAT,)),
    "eyes": Preset("chat about pictures", (_SEES,)),
    "search": Preset("chat over documents: embeddings and a ranker", (_CHAT, _EMBEDS, _RANKS)),
    "studio": Preset(
        "everything: chat, ears, a voice and pictures", (_CHAT, _HEARS, _SPEAKS, _DRAWS)
    ),
}


def preset_of(name: str | None) -> Preset | None:
    """Return a preset; None for None. Raises ConfigError for a name that is not in the table."""
    if name is None:
        return None
    if name not in PRESETS:
        raise ConfigError(
            f"--preset: {name!r} is unknown; choose one of {', '.join(PRESETS)}", param="--preset"
        )
    return PRESETS[name]


def show_presets() -> None:
    """Print the table of presets."""
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("preset", "sense", "model", "licence"):
        table.add_column(title, no_wrap=True)
    for title in ("parameters", "download", "memory"):
        table.add_column(title, justify="right")
    for name, preset in PRESETS.items():
        for number, model in enumerate(preset.models):
            table.add_row(
                "" if number else name,
                model.sense,
                model.name,
                model.licence,
                f"{model.parameters} M",
                model.download,
                model.memory,
            )
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    console.print(table)
