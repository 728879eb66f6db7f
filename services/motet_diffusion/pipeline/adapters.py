"""Apply LoRA adapters (Hu et al. 2021) row by row: every picture of a batch has its own, or none.

diffusers' own loaders read the files and determine where each adapter belongs; the layers that they
insert are replaced by `LoraLayer`, which adds to each row the output of its picture's adapters.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
_LOAD_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RuntimeError,
    ImportError,
    SafetensorError,
)
_MAX_SCALE = 10.0  # largest absolute scale; more is taken for a mistake


class BatchAdapters:
    """Hold the adapters of the current pass: by name, their rows and a scale for each row."""

    def __init__(self) -> None:
        self.rows = 0
        self._by_name: dict[str, tuple[Tensor, Tensor]] = {}

    def set(self, pictures: Sequence[tuple[Sequence[Lora], int]]) -> None:
        """Set the adapters of each picture of the pass, and its number of rows."""
        self.rows, found = 0, dict[str, tuple[list[int], list[float]]]()
        for loras, rows in pictures:
            for lora in loras:
                row_indices, scales = found.setdefault(lora.name, ([], []))
                row_indices += range(self.rows, self.rows + rows)
                scales += [lora.scale] * rows
            self.rows += rows
        self._by_name = {
            name: (torch.tensor(row_indices), torch.tensor(scales))
            for name, (row_indices, scales) in found.items()
        }

    @contextmanager
    def of_rows(self, rows: Sequence[int]) -> Iterator[None]:
        """Leave out all other rows of the pass while in the block, for layers that get these only."""
        if len(rows) == self.rows or not self._by_name:
            yield
            return
        whole, count = self._by_name, self.rows
        places = {row: place for place, row in enumerate(rows)}
        self._by_name, self.rows = {}, len(rows)
        for name, (indices, scales) in whole.items():
            kept = [number for number, row in enumerate(indices.tolist()) if row in places]
            if kept:
                where = torch.tensor([places[int(indices[number])] for number in kept])
                self._by_name[name] = (where, scales[kept])
        try:
            yield
        finally:
            self._by_name, self.rows = whole, count

    def of(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Return the rows and scales of an adapter in the current pass; None if it is not used."""
        return self._by_name.get(name)


class LoraLayer(nn.Module):
    """Add adapters to a linear layer or convolution. `factors_by_name`: (down, up, scale) by name."""

    def __init__(
        self,
        base: nn.Module,
        factors_by_name: dict[str, tuple[nn.Module, nn.Module, float]],
        adapters: BatchAdapters,
    ):
        super().__init__()
        self.base = base
        self.down = nn.ModuleList([down for down, _, _ in factors_by_name.values()])
        self.up = nn.ModuleList([up for _, up, _ in factors_by_name.values()])
        self._scales = [scale for _, _, scale in factors_by_name.values()]
        self._names = list(factors_by_name)
        self._adapters = adapters

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
            if (use := self._adapters.of(name)) is not None:
                row_indices, scales = self._expand(*use, len(x))
                added = up(down(x[row_indices].to(_dtype(down)))).to(out.dtype)
                factors = (scales * scale).to(out).view(-1, *[1] * (out.ndim - 1))
                out[row_indices] += added * factors
        return out

    def _expand(self, row_indices: Tensor, scales: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Expand row numbers and scales for layers with several rows per row of the batch."""
        repeats, remainder = divmod(rows, max(self._adapters.rows, 1))
        if remainder or not repeats:
            raise InternalError(
                f"a layer with adapters has {rows} rows in a batch of {self._adapters.rows}"
            )
        if repeats == 1:
            return row_indices, scales
        return (
            row_indices[:, None] * repeats + torch.arange(repeats)
        ).flatten(), scales.repeat_interleave(repeats)


def _dtype(module: nn.Module) -> torch.dtype:
    return next(module.parameters()).dtype


class Adapters:
    """Hold the adapters of one model, by name.

    `given`: "name=path" each, a safetensors file or a folder with one. Raises ConfigError for files
    that diffusers does not load, or that do not fit this model.
    """

    def __init__(self, pipeline: Any, given: Sequence[str]):
        self.denoiser, self._text = BatchAdapters(), BatchAdapters()
        self.names: list[str] = []
        if not given:
            return
        for number, item in enumerate(given):
            name, separator, path = item.partition("=")
            if not separator or not name or name in self.names:
                raise ConfigError(
                    f"loras={item!r}: give each adapter as name=path, each with a different name"
                )
            self._load(pipeline, name, Path(path), f"motet{number}")
            self.names.append(name)
        self._replace_layers(pipeline)

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
                message = f"{where}.name: {lora.name!r} is given twice; give each adapter once"
                raise BadRequest(message, param=f"{where}.name")
            if not math.isfinite(lora.scale) or abs(lora.scale) > _MAX_SCALE:
                message = f"{where}.scale: {lora.scale}; give {-_MAX_SCALE:g} to {_MAX_SCALE:g}"
                raise BadRequest(message, param=f"{where}.scale")
            seen.add(lora.name)

    def select_for_text(self, loras: Sequence[Lora]) -> None:
        """Select the adapters for the next text encoding: one picture and one caller at a time."""
        self._text.set([(loras, 1)])

    # -------------------------------------------------------------------------------------- loading
    def _load(self, pipeline: Any, name: str, path: Path, adapter_name: str) -> None:
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
                    adapter_name=adapter_name,
                    local_files_only=True,
                    use_safetensors=True,
                    low_cpu_mem_usage=False,
                    **place,
                )
        except _LOAD_ERRORS as error:
            first = (str(error).strip() or type(error).__name__).split("\n")[0]
            raise ConfigError(
                f"{where}: diffusers does not load it for this model: {first}"
            ) from None
        if not any(
            adapter_name in getattr(layer, "lora_A", {})
            for _, model in _models(pipeline)
            for layer in model.modules()
        ):
            raise ConfigError(
                f"{where}: holds nothing for a {type(pipeline).__name__}; it is another model's"
            )

    def _replace_layers(self, pipeline: Any) -> None:
        """Replace peft's layers with `LoraLayer`."""
        names_by_adapter = {f"motet{number}": name for number, name in enumerate(self.names)}
        for part, model in _models(pipeline):
            adapters = self._text if part.startswith(_TEXT) else self.denoiser
            for parent, child_name, layer in _layers(model):
                factors_by_name = {
                    names_by_adapter[adapter_name]: (
                        layer.lora_A[adapter_name],
                        layer.lora_B[adapter_name],
                        layer.scaling[adapter_name],
                    )
                    for adapter_name in layer.lora_A
                }
                setattr(
                    parent, child_name, LoraLayer(layer.get_base_layer(), factors_by_name, adapters)
                )
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
