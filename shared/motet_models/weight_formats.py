"""Compute the bytes of weights in memory: formats of matrices, and the codes of quantized checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from .model_shape import ModelShape

SMALL_BYTES = 4  # bytes per number: norms, biases and other small vectors are float32
PANEL = 32  # outputs that the CPU's kernels pack together; matrices are padded to whole panels


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """Describe a number format of weight matrices.

    bits: per element.
    row_bytes, group_bytes: scales per row, or per group of `group` elements.
    table_bytes: per element of the embeddings, which stay unquantized.
    compute: the processor's rate that applies, "bf16" or "int8".
    """

    name: str
    bits: int
    row_bytes: int = 0
    group: int = 0
    group_bytes: int = 0
    table_bytes: int = 2
    compute: str = "bf16"

    def matrix_bytes(self, elements: int, rows: int) -> int:
        """Return the bytes of matrices with `elements` elements in `rows` rows."""
        groups = elements // self.group if self.group else 0
        return elements * self.bits // 8 + rows * self.row_bytes + groups * self.group_bytes


WEIGHT_FORMATS = {
    "float32": WeightFormat(name="float32", bits=32, table_bytes=4),
    "bfloat16": WeightFormat(name="bfloat16", bits=16),
    "int8": WeightFormat(name="int8", bits=8, row_bytes=4, compute="int8"),
    "int4": WeightFormat(name="int4", bits=4, group=32, group_bytes=2),
    "float8": WeightFormat(name="float8", bits=8, row_bytes=4),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCodes:
    """Describe what a quantized checkpoint keeps in its own codes.

    format: of the codes; of several, one with their mean size.
    parts: the parts of `Parameters` whose matrices are in codes.
    total: bytes of all weights where the checkpoint lists its tensors; 0: computed from the parts.
    """

    format: WeightFormat
    parts: tuple[str, ...] = ("attention", "recurrent", "mlp", "experts")
    total: int = 0


def weight_bytes(
    shape: ModelShape,
    format: WeightFormat,
    codes: CheckpointCodes | None = None,
) -> int:
    """Return the bytes of all weights in memory.

    A tied lm_head shares the embeddings' memory unless it is quantized. codes: of a quantized
    checkpoint; matrices in them are not counted in the other formats.
    """
    if codes is not None and codes.total:
        return codes.total
    counts = shape.parameters
    head = shape.vocab * shape.hidden if counts.tied else 0
    shared = format.bits >= 16
    table = counts.embeddings - (head if shared else 0)
    small = counts.total - counts.embeddings - (counts.matrices - head)
    own = dict.fromkeys(codes.parts, codes.format) if codes is not None else {}
    padding = format.matrix_bytes(-shape.vocab % PANEL * shape.hidden, 0)  # of lm_head
    matrices = _matrix_bytes(shape, format, own) + padding
    return matrices + table * format.table_bytes + small * SMALL_BYTES


def _matrix_bytes(shape: ModelShape, format: WeightFormat, own: dict[str, WeightFormat]) -> int:
    """Return the bytes of all matrices; own: the formats of parts that are not in `format`."""
    counts = shape.parameters
    left, total = counts.matrices, 0
    for part, other in own.items():
        # A part's count includes its biases, which are few.
        elements = min(getattr(counts, part), left)
        left -= elements
        total += other.matrix_bytes(elements, _share_of(counts.matrix_rows, elements, shape))
    return total + format.matrix_bytes(left, _share_of(counts.matrix_rows, left, shape))


def _share_of(rows: int, elements: int, shape: ModelShape) -> int:
    matrices = shape.parameters.matrices
    return rows if elements == matrices else round(rows * elements / max(matrices, 1))
