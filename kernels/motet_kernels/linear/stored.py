"""Take packed matrices apart into named tensors, and put them together again.

So packed forms can be kept in a file. Native kernels read memory by address, so every tensor that
is put together is first checked against the layout of its format.

Shapes: N output features, K input features, P = ⌈N/32⌉ panels, G groups of inputs, S spans of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from motet_kernels.linear.code_linear import CodeLinear, CodeParts
from motet_kernels.linear.group_weights import BLOCK
from motet_kernels.linear.grouped_linear import GroupedLinear
from motet_kernels.linear.levels import LEVELS
from motet_kernels.linear.linear import Linear
from motet_kernels.linear.mixed_linear import MixedLinear
from motet_kernels.linear.panels import GROUP_BYTES, PANEL
from motet_kernels.linear.quantization import GROUP
from motet_kernels.linear.row_linear import RowLinear
from motet_kernels.linear.scales import PackedScales
from motet_kernels.runtime.errors import KernelError

Fields = dict[str, Any]
Tensors = dict[str, Tensor]

_ONE_LEVEL = (torch.float32, torch.float16, torch.bfloat16)  # types of scales that no span shares


def take_apart(linear: Linear) -> tuple[Fields, Tensors]:
    """Split a packed CPU matrix into fields that JSON can hold, and tensors.

    Raises KernelError for a matrix in the layout of a GPU.
    """
    if isinstance(linear, MixedLinear):
        return _take_parts(linear)
    if isinstance(linear, RowLinear) or linear.packed.device.type != "cpu":
        raise KernelError("linear: is in the layout of a GPU; only those of a CPU are stored")
    fields: Fields = {
        "format": linear.format,
        "features": linear.out_features,
        "inputs": linear.in_features,
    }
    tensors = {"packed": linear.packed}
    if linear.bias_N is not None:
        tensors["bias"] = linear.bias_N
    if isinstance(linear, CodeLinear):
        return _take_codes(linear, fields, tensors)
    if isinstance(linear, GroupedLinear):
        return _take_groups(linear, fields, tensors)
    if linear.scale_N is not None:
        tensors["scale"] = linear.scale_N
    return fields | {"kind": "panels"}, tensors


def put_together(fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Linear:
    """Return the matrix of `take_apart`, which keeps these tensors.

    Raises KernelError if they do not fit each other, as in a damaged file.
    """
    try:
        return _KINDS[fields["kind"]](fields, tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise KernelError(f"fields: {error!r} does not describe a packed matrix") from error


def _check(
    tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...], *kinds: torch.dtype
) -> Tensor:
    tensor = tensors[name]
    if tuple(tensor.shape) != shape or tensor.dtype not in kinds or not tensor.is_contiguous():
        raise KernelError(
            f"{name}: {tensor.dtype} {list(tensor.shape)} must be {kinds[0]} {list(shape)}"
        )
    return tensor


def _sizes(fields: Mapping[str, Any]) -> tuple[int, int]:
    features, inputs = fields["features"], fields["inputs"]
    if type(features) is not int or type(inputs) is not int or features < 1 or inputs < 1:
        raise KernelError(f"features, inputs: {features!r}, {inputs!r} must be positive")
    return features, inputs


def _bias(tensors: Mapping[str, Tensor], features: int) -> Tensor | None:
    return _check(tensors, "bias", (features,), torch.float32) if "bias" in tensors else None


def _order(tensors: Mapping[str, Tensor], inputs: int) -> Tensor | None:
    if "order" not in tensors:
        return None
    order_K = _check(tensors, "order", (inputs,), torch.int32)
    if not torch.equal(order_K.sort().values, torch.arange(inputs, dtype=torch.int32)):
        raise KernelError(f"order: must be each of the {inputs} inputs once")
    return order_K


# --------------------------------------------------------------------------------- numbers in panels
def _put_panels(fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Linear:
    features, inputs = _sizes(fields)
    panels, form = -(-features // PANEL), fields["format"]
    layouts: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "float32": ((panels, -(-inputs // 2), 2, PANEL), torch.float32),
        "bfloat16": ((panels, -(-inputs // 2), PANEL, 2), torch.bfloat16),
        "int8": ((panels, -(-inputs // 4), PANEL, 4), torch.uint8),
        "int4": ((panels, -(-inputs // GROUP), GROUP_BYTES), torch.uint8),
    }
    packed = _check(tensors, "packed", *layouts[form])
    scale_N = None
    if form == "int8":
        scale_N = _check(tensors, "scale", (panels * PANEL,), torch.float32)
    return Linear(packed, scale_N, _bias(tensors, features), (features, inputs), form)


# --------------------------------------------------------------------------------------------- codes
def _take_codes(linear: CodeLinear, fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
    fields |= {
        "kind": "codes",
        "codes": linear.codes,
        "offset": linear.offset,
        "group": linear.group,
        "precise": linear.precise,
    }
    for name, scales in (("scale", linear.scale), ("shift", linear.shift)):
        if scales is None:
            continue
        fields[f"{name}_span"] = scales.span
        tensors[name] = scales.fine
        if scales.coarse is not None:
            tensors[f"{name}_coarse"] = scales.coarse
    if linear.order_K is not None:
        tensors["order"] = linear.order_K
    return fields, tensors


def _put_codes(fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Linear:
    features, inputs = _sizes(fields)
    codes, group = fields["codes"], fields["group"]
    if (
        codes not in ("int2", "int4", "int8", *LEVELS)
        or group < 16
        or (group != 16 and group % GROUP)
    ):
        raise KernelError(f"codes, group: {codes!r}, {group!r} are of no layout")
    words = {"int2": 2, "int8": 8}.get(codes, 4)
    shape = (-(-features // PANEL), -(-inputs // GROUP), words, PANEL, 4)
    parts = CodeParts(
        packed=_check(tensors, "packed", shape, torch.uint8),
        bias_N=_bias(tensors, features),
        shape=(features, inputs),
        form=str(fields["format"]),
        codes=codes,
        offset=float(fields["offset"]),
        group=group,
        scale=_scales("scale", fields, tensors, group),
        shift=_scales("shift", fields, tensors, group) if "shift" in tensors else None,
        order_K=_order(tensors, inputs),
        precise=bool(fields["precise"]),
    )
    return CodeLinear.of_parts(parts)


def _scales(
    name: str, fields: Mapping[str, Any], tensors: Mapping[str, Tensor], group: int
) -> PackedScales:
    features, inputs = _sizes(fields)
    panels, groups, span = -(-features // PANEL), -(-inputs // group), fields[f"{name}_span"]
    if type(span) is not int or span < 1:
        raise KernelError(f"{name}_span: {span!r} must be positive")
    fine_shape, shape = (panels, groups, PANEL), (panels, -(-groups // span), PANEL)
    if f"{name}_coarse" not in tensors:
        return PackedScales.of_panels(_check(tensors, name, fine_shape, *_ONE_LEVEL), None, span)
    fine = _check(tensors, name, fine_shape, torch.int8)
    coarse = _check(tensors, f"{name}_coarse", shape, torch.float32, torch.float16)
    return PackedScales.of_panels(fine, coarse, span)


# -------------------------------------------------------------------------------------------- float8
def _take_groups(linear: GroupedLinear, fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
    if linear.codes != "float8":
        raise KernelError(f"linear: {linear.codes} in rows is a layout of GPUs")
    tensors["scale"] = linear.scale_NG
    if linear.order_K is not None:
        tensors["order"] = linear.order_K
    return fields | {"kind": "groups", "group": linear.group}, tensors


def _put_groups(fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Linear:
    features, inputs = _sizes(fields)
    group, width = fields["group"], -(-inputs // BLOCK) * BLOCK
    if type(group) is not int or group < 1:
        raise KernelError(f"group: {group!r} must be positive")
    return GroupedLinear.of_rows(
        _check(tensors, "packed", (features, width), torch.uint8),
        _check(tensors, "scale", (features, -(-inputs // group)), torch.float32),
        _bias(tensors, features),
        _order(tensors, inputs),
        inputs,
        group,
        str(fields["format"]),
    )


# ------------------------------------------------------------------------------------- several formats
def _take_parts(linear: MixedLinear) -> tuple[Fields, Tensors]:
    parts = [take_apart(part) for part in linear.parts]
    tensors = {
        f"{number}.{name}": tensor
        for number, (_, part) in enumerate(parts)
        for name, tensor in part.items()
    }
    return {"kind": "mixed", "parts": [fields for fields, _ in parts]}, tensors


def _put_parts(fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Linear:
    parts: list[Any] = []
    for number, part in enumerate(fields["parts"]):
        prefix = f"{number}."
        own = {
            name.removeprefix(prefix): tensor
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        parts.append(put_together(part, own))
    return MixedLinear(parts)


_KINDS = {"panels": _put_panels, "codes": _put_codes, "groups": _put_groups, "mixed": _put_parts}
