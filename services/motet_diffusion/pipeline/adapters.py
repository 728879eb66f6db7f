"""Apply LoRA adapters (Hu et al. 2021) row by row: every picture of a batch has its own, or none.

diffusers' own loaders read the files and determine where each adapter belongs; the layers that they
insert are replaced by `Adapted`, which adds to each row the output of its picture's adapters.
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

from motet_diffusion.engine.request import Lora
from motet_models.checkpoints import check_file
from motet_shared.errors import BadRequest, ConfigError, InternalError

_PARTS = ("unet", "transformer", "text_encoder", "text_encoder_2", "text_encoder_3")
_TEXT = "text_encoder"
_UNUSABLE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RuntimeError,
    ImportError,
    SafetensorError,
)
_STRONGEST = 10.0  # largest absolute scale; more is taken for a mistake


class Mix:
    """Hold the adapters of the current pass: by name, their rows and a scale for each row."""

    def __init__(self) -> None:
        self.rows = 0
        self._uses: dict[str, tuple[Tensor, Tensor]] = {}

    def set(self, pictures: Sequence[tuple[Sequence[Lora], int]]) -> None:
        """Set the adapters of each picture of the pass, and its number of rows."""
        self.rows, found = 0, dict[str, tuple[list[int], list[float]]]()
        for loras, rows in pictures:
            for lora in loras:
                places, scales = found.setdefault(lora.name, ([], []))
                places += range(self.rows, self.rows + rows)
                scales += [lora.scale] * rows
            self.rows += rows
        self._uses = {
            name: (torch.tensor(places), torch.tensor(scales))
            for name, (places, scales) in found.items()
        }

    def of(self, name: str) -> tuple[Tensor, Tensor] | None:
        return self._uses.get(name)


class Adapted(nn.Module):
    """Add adapters to a linear layer or convolution. `parts`: (down, up, scale) by name."""

    def __init__(
        self, base: nn.Module, parts: dict[str, tuple[nn.Module, nn.Module, float]], mix: Mix
    ):
        super().__init__()
        self.base = base
        self.down = nn.ModuleList([down for down, _, _ in parts.values()])
        self.up = nn.ModuleList([up for _, up, _ in parts.values()])
        self._scales = [scale for _, _, scale in parts.values()]
        self._names = list(parts)
        self._mix = mix

    @property
    def weight(self) -> Tensor:
        """Return the base weight; models read its dtype."""
        weight: Tensor = self.base.weight  # type: ignore[assignment]
        return weight

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = self.base(x, *args, **kwargs)
        for name, down, up, scale in zip(
            self._names, self.down, self.up, self._scales, strict=True
        ):
            if (use := self._mix.of(name)) is not None:
                places, scales = self._spread(*use, len(x))
                added = up(down(x[places].to(_dtype(down)))).to(out.dtype)
                factors = (scales * scale).to(out).view(-1, *[1] * (out.ndim - 1))
                out[places] += added * factors
        return out

    def _spread(self, places: Tensor, scales: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Expand row numbers and scales for layers with several rows per row of the batch."""
        times, odd = divmod(rows, max(self._mix.rows, 1))
        if odd or not times:
            raise InternalError(
                f"a layer with adapters has {rows} rows in a batch of {self._mix.rows}"
            )
        if times == 1:
            return places, scales
        return (places[:, None] * times + torch.arange(times)).flatten(), scales.repeat_interleave(
            times
        )


def _dtype(module: nn.Module) -> torch.dtype:
    return next(module.parameters()).dtype


class Adapters:
    """Hold the adapters of one model, by name.

    `given`: "name=path" each, a safetensors file or a folder with one. Raises ConfigError for files
    that diffusers does not load, or that do not fit this model.
    """

    def __init__(self, pipeline: Any, given: Sequence[str]):
        self.denoiser, self._text = Mix(), Mix()
        self.names: list[str] = []
        if not given:
            return
        for number, one in enumerate(given):
            name, separator, path = one.partition("=")
            if not separator or not name or name in self.names:
                raise ConfigError(
                    f"loras={one!r}: give each adapter as name=path, with a name of its own"
                )
            self._load(pipeline, name, Path(path), f"motet{number}")
            self.names.append(name)
        self._take_over(pipeline)

    def check(self, loras: Sequence[Lora]) -> None:
        """Raise BadRequest if an adapter is unknown or repeated, or its scale is out of range."""
        seen = set[str]()
        for number, lora in enumerate(loras):
            where = f"loras[{number}]"
            if lora.name not in self.names:
                known = (
                    f"this model has {', '.join(self.names)}"
                    if self.names
                    else "this model has no adapters"
                )
                raise BadRequest(
                    f"{where}.name: {lora.name!r} is unknown; {known}", param=f"{where}.name"
                )
            if lora.name in seen:
                message = f"{where}.name: {lora.name!r} is there twice; give it one scale"
                raise BadRequest(message, param=f"{where}.name")
            if not math.isfinite(lora.scale) or abs(lora.scale) > _STRONGEST:
                message = f"{where}.scale: {lora.scale}; give {-_STRONGEST:g} to {_STRONGEST:g}"
                raise BadRequest(message, param=f"{where}.scale")
            seen.add(lora.name)

    def read(self, loras: Sequence[Lora]) -> None:
        """Select the adapters for the next text encoding: one picture, one caller at a time."""
        self._text.set([(loras, 1)])

    # -------------------------------------------------------------------------------------- loading
    def _load(self, pipeline: Any, name: str, path: Path, inner: str) -> None:
        where = f"loras={name}={path}"
        if not hasattr(pipeline, "load_lora_weights"):
            raise ConfigError(
                f"{where}: diffusers has no adapters for a {type(pipeline).__name__}; leave it out"
            )
        if not path.exists():
            raise ConfigError(f"{where}: there is no such file or folder")
        for file in [path] if path.is_file() else sorted(path.glob("*.safetensors")):
            check_file(file)
        place = {"weight_name": path.name} if path.is_file() else {}
        try:
            with warnings.catch_warnings():
                # peft warns about a second adapter, which is intended here.
                warnings.filterwarnings("ignore", "Already found a `peft_config`")
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
            raise ConfigError(
                f"{where}: diffusers does not load it for this model: {first}"
            ) from None
        if not any(
            inner in getattr(layer, "lora_A", {})
            for _, model in _models(pipeline)
            for layer in model.modules()
        ):
            raise ConfigError(
                f"{where}: holds nothing for a {type(pipeline).__name__}; it is another model's"
            )

    def _take_over(self, pipeline: Any) -> None:
        """Replace peft's layers with `Adapted`."""
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
    """Return peft's layers as (parent, name, layer). Raises ConfigError for any but plain LoRA."""
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
            raise ConfigError(
                f"loras: adapt {name} by a {type(layer).__name__} that is not served; take plain LoRA"
            )
    return found


def _models(pipeline: Any) -> list[tuple[str, Any]]:
    """Return the pipeline's parts that adapters may belong to."""
    found = ((name, getattr(pipeline, name, None)) for name in _PARTS)
    return [(name, model) for name, model in found if isinstance(model, nn.Module)]
