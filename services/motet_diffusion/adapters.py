"""LoRA adapters (Hu et al. 2021), mixed row by row: every picture has its own, or none, in whatever company.

diffusers' own loaders read the files and say where each adapter belongs; what they put there is replaced by `Adapted`,
which adds to each row what the adapters of its picture make of it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from motet_shared.errors import BadRequest, ConfigError, InternalError

from .drawing import Lora

_PARTS = ("unet", "transformer", "text_encoder", "text_encoder_2", "text_encoder_3")
_TEXT = "text_encoder"
_UNUSABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, ImportError, SafetensorError)
_STRONGEST = 10.0  # a scale beyond it is a mistake


class Mix:
    """Which adapters take part in the pass that is made now: by name, the rows and a scale for each of them."""

    def __init__(self) -> None:
        self.rows = 0
        self._uses: dict[str, tuple[Tensor, Tensor]] = {}

    def set(self, pictures: Sequence[tuple[Sequence[Lora], int]]) -> None:
        """The adapters of each picture of the pass, and how many rows it has."""
        self.rows, found = 0, dict[str, tuple[list[int], list[float]]]()
        for loras, rows in pictures:
            for lora in loras:
                places, scales = found.setdefault(lora.name, ([], []))
                places += range(self.rows, self.rows + rows)
                scales += [lora.scale] * rows
            self.rows += rows
        self._uses = {name: (torch.tensor(places), torch.tensor(scales)) for name, (places, scales) in found.items()}

    def of(self, name: str) -> tuple[Tensor, Tensor] | None:
        return self._uses.get(name)


class Adapted(nn.Module):
    """A matrix or convolution, and what adapters add to it. `parts`: (down, up, scale) by name."""

    def __init__(self, base: nn.Module, parts: dict[str, tuple[nn.Module, nn.Module, float]], mix: Mix):
        super().__init__()
        self.base = base
        self.down = nn.ModuleList([down for down, _, _ in parts.values()])
        self.up = nn.ModuleList([up for _, up, _ in parts.values()])
        self._scales = [scale for _, _, scale in parts.values()]
        self._names = list(parts)
        self._mix = mix

    @property
    def weight(self) -> Tensor:
        """Models ask for its type."""
        weight: Tensor = self.base.weight  # type: ignore[assignment]
        return weight

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = self.base(x, *args, **kwargs)
        for name, down, up, scale in zip(self._names, self.down, self.up, self._scales, strict=True):
            if (use := self._mix.of(name)) is not None:
                places, scales = self._spread(*use, len(x))
                added = up(down(x[places].to(_dtype(down)))).to(out.dtype)
                factors = (scales * scale).to(out).view(-1, *[1] * (out.ndim - 1))
                out[places] += added * factors
        return out

    def _spread(self, places: Tensor, scales: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """For layers that see several rows for each row of the batch."""
        times, odd = divmod(rows, max(self._mix.rows, 1))
        if odd or not times:
            raise InternalError(f"a layer with adapters has {rows} rows in a batch of {self._mix.rows}")
        if times == 1:
            return places, scales
        return (places[:, None] * times + torch.arange(times)).flatten(), scales.repeat_interleave(times)


def _dtype(module: nn.Module) -> torch.dtype:
    return next(module.parameters()).dtype


class Adapters:
    """Those of one model, by name. `given`: "name=path" each, a safetensors file or a folder with one.

    Raises ConfigError for what diffusers does not read, or what is not for this model.
    """

    def __init__(self, pipeline: Any, given: Sequence[str]):
        self.denoiser, self._text = Mix(), Mix()
        self.names: list[str] = []
        if not given:
            return
        for number, one in enumerate(given):
            name, separator, path = one.partition("=")
            if not separator or not name or name in self.names:
                raise ConfigError(f"loras={one!r}: give each adapter as name=path, with a name of its own")
            self._load(pipeline, name, Path(path), f"motet{number}")
            self.names.append(name)
        self._take_over(pipeline)

    def check(self, loras: Sequence[Lora]) -> None:
        """BadRequest if a picture cannot have these."""
        seen = set[str]()
        for number, lora in enumerate(loras):
            where = f"loras[{number}]"
            if lora.name not in self.names:
                known = f"this model has {', '.join(self.names)}" if self.names else "this model has no adapters"
                raise BadRequest(f"{where}.name: {lora.name!r} is unknown; {known}", param=f"{where}.name")
            if lora.name in seen:
                message = f"{where}.name: {lora.name!r} is there twice; give it one scale"
                raise BadRequest(message, param=f"{where}.name")
            if not math.isfinite(lora.scale) or abs(lora.scale) > _STRONGEST:
                message = f"{where}.scale: {lora.scale}; give {-_STRONGEST:g} to {_STRONGEST:g}"
                raise BadRequest(message, param=f"{where}.scale")
            seen.add(lora.name)

    def read(self, loras: Sequence[Lora]) -> None:
        """Text is about to be read for one picture, by one caller at a time; its rows are all alike."""
        self._text.set([(loras, 1)])

    # -------------------------------------------------------------------------------------------------------- loading
    def _load(self, pipeline: Any, name: str, path: Path, inner: str) -> None:
        where = f"loras={name}={path}"
        if not hasattr(pipeline, "load_lora_weights"):
            raise ConfigError(f"{where}: diffusers has no adapters for a {type(pipeline).__name__}; leave it out")
        if not path.exists():
            raise ConfigError(f"{where}: there is no such file or folder")
        place = {"weight_name": path.name} if path.is_file() else {}
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Already found a `peft_config`")  # several are what is wanted
                pipeline.load_lora_weights(
                    str(path.parent if path.is_file() else path),
                    adapter_name=inner,
                    local_files_only=True,
                    use_safetensors=True,
                    low_cpu_mem_usage=False,
                    **place,
                )
        except _UNUSABLE as error:
            first = (str(error).strip() or type(error).__name__).split("\n")[0]
            raise ConfigError(f"{where}: diffusers does not load it for this model: {first}") from None
        if not any(
            inner in getattr(layer, "lora_A", {}) for _, model in _models(pipeline) for layer in model.modules()
        ):
            raise ConfigError(f"{where}: holds nothing for a {type(pipeline).__name__}; it is another model's")

    def _take_over(self, pipeline: Any) -> None:
        """Put `Adapted` where peft's layers are."""
        outer = {f"motet{number}": name for number, name in enumerate(self.names)}
        for part, model in _models(pipeline):
            mix = self._text if part.startswith(_TEXT) else self.denoiser
            for parent, child_name, layer in _layers(model):
                parts = {
                    outer[inner]: (layer.lora_A[inner], layer.lora_B[inner], layer.scaling[inner])
                    for inner in layer.lora_A
                }
                setattr(parent, child_name, Adapted(layer.get_base_layer(), parts, mix))
            model.requires_grad_(False)
            if hasattr(model, "peft_config"):
                del model.peft_config
                model._hf_peft_config_loaded = False


def _layers(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """peft's layers, and whose children they are under which name. ConfigError for what is no plain LoRA."""
    from peft.tuners.lora import Conv2d, Linear
    from peft.tuners.tuners_utils import BaseTunerLayer

    found: list[tuple[nn.Module, str, Any]] = [
        (parent, name, child)
        for parent in model.modules()
        if not isinstance(parent, BaseTunerLayer)
        for name, child in parent.named_children()
        if isinstance(child, BaseTunerLayer)
    ]
    for _, name, layer in found:
        if type(layer) not in (Linear, Conv2d) or layer.lora_variant:
            raise ConfigError(f"loras: adapt {name} by a {type(layer).__name__} that is not served; take plain LoRA")
    return found


def _models(pipeline: Any) -> list[tuple[str, Any]]:
    """The parts that adapters may belong to."""
    found = ((name, getattr(pipeline, name, None)) for name in _PARTS)
    return [(name, model) for name, model in found if isinstance(model, nn.Module)]
