"""Define the kernels of `paged_attention.py`: attend to a tile's keys or a segment; merge segments.

Shapes: L lines of a tile, T keys of a block, Z segments, G heads that share a key, D and E the key
dim's two parts, V and U the value dim's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from motet_kernels.gpu.attention.online_softmax import (
    LOG2_E,
    attend_keys,
    initial_state,
    load_part,
    store_part,
)
from motet_kernels.gpu.codes import WORD_BYTES

_VARIES = ["num_long", "segments", "stride_table", "num_entries", "num_blocks", "window"]


@triton.jit
def _tile(
    tiles_ptr,
    number,
    lengths_ptr,
    window,
    L: tl.constexpr,
    G: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Return the position of a tile, and the keys that its `L` lines attend to.

    The result is (its row; for each line the packed token, the head, whether it exists, its first
    and its last key; the tile's first key, the one after its last, the last key of its first line).
    """
    row = tl.load(tiles_ptr + number * 4)
    start = tl.load(tiles_ptr + number * 4 + 1)
    queries = tl.load(tiles_ptr + number * 4 + 2)
    first = tl.load(tiles_ptr + number * 4 + 3)
    length = tl.load(lengths_ptr + row)
    line_L = first + tl.arange(0, L)
    mask_L = line_L < queries * G
    last = tl.minimum(first + L, queries * G) - 1
    lo, hi, top = 0, length, length - 1
    last_L = tl.full([L], 0, tl.int32) + top
    if CAUSAL:
        top = length - queries + first // G
        last_L = length - queries + line_L // G
        hi = length - queries + last // G + 1
    if WINDOW:
        lo = tl.maximum(top - window + 1, 0)
    return row, start + line_L // G, line_L % G, mask_L, last_L - window + 1, last_L, lo, hi, top


@triton.jit
def _finish(state, sinks_ptr, at_L, mask_L, broken, SINKS: tl.constexpr):
    """Return the results of a walk with the sinks' share, and NaN where a table was invalid."""
    max_L, sum_L, out_LV, out_LU, bad_T = state
    if SINKS:
        sink_L = tl.load(sinks_ptr + at_L, mask=mask_L, other=0.0) * LOG2_E
        top_L = tl.maximum(max_L, sink_L)
        decay_L = tl.exp2(max_L - top_L)
        sum_L = sum_L * decay_L + tl.exp2(sink_L - top_L)
        out_LV = out_LV * decay_L[:, None]
        out_LU = out_LU * decay_L[:, None]
    if broken | (tl.max(bad_T, 0) > 0):
        sum_L = sum_L + float("nan")
    return max_L, sum_L, out_LV, out_LU


@triton.jit
def _write(out_LV, out_LU, to_L, mask_L, VALUE_DIM: tl.constexpr, V: tl.constexpr, U: tl.constexpr):
    store_part(to_L, out_LV, mask_L, 0, V, VALUE_DIM)
    if U:
        store_part(to_L, out_LU, mask_L, V, U, VALUE_DIM)


@triton.jit
def _attend(
    tile,
    segment,
    part,
    query,
    keys,
    values,
    pages,
    given,
    made,
    kv_head,
    num_heads,
    L: tl.constexpr,
    SPLIT: tl.constexpr,
    G: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    SHARED: tl.constexpr,
    WIDE: tl.constexpr,
    CODES: tl.constexpr,
    KEYS: tl.constexpr,
    SLOTS: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    V: tl.constexpr,
    U: tl.constexpr,
):
    """Compute a tile of `L` lines over all its keys or, with SPLIT, over a segment of SPLIT keys.

    part: index of the segment's sums, if the tile has several segments.
    query, pages: pointer and strides.
    given: (tiles, lengths, sinks, window, scale, softcap).
    made: (results, parts, sums).
    """
    query_ptr, stride_qn, stride_qh = query
    tables_ptr, stride_table, num_entries, num_blocks = pages
    tiles_ptr, lengths_ptr, sinks_ptr, window, scale, softcap = given
    out_ptr, parts_ptr, sums_ptr = made
    row, token_L, head_L, mask_L, first_L, last_L, lo, hi, top = _tile(
        tiles_ptr, tile, lengths_ptr, window, L, G, CAUSAL, WINDOW
    )
    broken = hi > num_entries * SLOTS
    hi = tl.minimum(hi, num_entries * SLOTS)
    begin, end = lo // KEYS * KEYS, hi
    if SPLIT:
        begin = tl.maximum(begin, (segment + lo // SPLIT) * SPLIT)
        end = tl.minimum(hi, (segment + lo // SPLIT + 1) * SPLIT)
    if (begin < hi) | (
        segment == 0
    ):  # the first segment writes NaN where the table is too short for any key
        at_L = kv_head * G + head_L
        query_L = query_ptr + token_L.to(tl.int64) * stride_qn + at_L.to(tl.int64) * stride_qh
        query_LD = load_part(query_L, mask_L, 0, D, DIM, WIDE)
        query_LE = load_part(query_L, mask_L, D, E, DIM, WIDE) if E else query_LD
        table = tables_ptr + row.to(tl.int64) * stride_table, num_blocks
        visibility = first_L, last_L, lo, hi, scale, softcap
        state = initial_state(L, KEYS, V, U)
        if not (SPLIT or WINDOW):
            whole = tl.minimum(top + 1, hi) // KEYS * KEYS
            state = attend_keys(
                *(
                    state,
                    query_LD,
                    query_LE,
                    keys,
                    values,
                    table,
                    visibility,
                    begin,
                    whole,
                    False,
                    False,
                ),
                *(SOFTCAP, True, SHARED, WIDE, CODES, KEYS, SLOTS, DIM, D, E, VALUE_DIM, V, U),
            )
            begin = whole
        state = attend_keys(
            *(state, query_LD, query_LE, keys, values, table, visibility, begin, end, True, WINDOW),
            *(SOFTCAP, True, SHARED, WIDE, CODES, KEYS, SLOTS, DIM, D, E, VALUE_DIM, V, U),
        )
        if SPLIT and (hi - 1) // SPLIT > lo // SPLIT:
            max_L, sum_L, out_LV, out_LU = _finish(state, sinks_ptr, at_L, mask_L, broken, False)
            part_L = part * L + tl.arange(0, L)
            tl.store(sums_ptr + part_L * 2, max_L, mask=mask_L)
            tl.store(sums_ptr + part_L * 2 + 1, sum_L, mask=mask_L)
            _write(out_LV, out_LU, parts_ptr + part_L * VALUE_DIM, mask_L, VALUE_DIM, V, U)
        else:
            max_L, sum_L, out_LV, out_LU = _finish(state, sinks_ptr, at_L, mask_L, broken, SINKS)
            to_L = out_ptr + (token_L.to(tl.int64) * num_heads + at_L) * VALUE_DIM
            _write(out_LV / sum_L[:, None], out_LU / sum_L[:, None], to_L, mask_L, VALUE_DIM, V, U)


@triton.jit(do_not_specialize=_VARIES)
def attend_tiles(
    query_ptr,
    key_ptr,
    value_ptr,
    out_ptr,
    parts_ptr,
    sums_ptr,
    tiles_ptr,
    tables_ptr,
    lengths_ptr,
    sinks_ptr,
    stride_qn,
    stride_qh,
    stride_kp,
    stride_kk,
    stride_ks,
    stride_vp,
    stride_vk,
    stride_vs,
    stride_table,
    num_entries,
    num_blocks,
    num_long,
    segments,
    window,
    scale,
    softcap,
    SHORT: tl.constexpr,
    LONG: tl.constexpr,
    SPLIT: tl.constexpr,
    G: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    SHARED: tl.constexpr,
    WIDE: tl.constexpr,
    CODES: tl.constexpr,
    SLOTS: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BEFORE_SCALE: tl.constexpr,
    V: tl.constexpr,
    U: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Compute all tiles of a step; the first `num_long` programs have the long ones.

    SHORT, LONG: lines of a tile, 0 where no row is of the kind.
    BEFORE_SCALE: number of elements of a value's row before its scale.

    Strides of a coded cache are in words.
    """
    word: tl.constexpr = 1 if CODES is None else WORD_BYTES
    program, kv_head, kv_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    query = query_ptr, stride_qn, stride_qh
    keys = key_ptr + kv_head.to(tl.int64) * stride_kk * word, stride_kp * word, stride_ks * word
    values = (
        value_ptr + kv_head.to(tl.int64) * stride_vk * word,
        stride_vp * word,
        stride_vs * word,
        BEFORE_SCALE,
    )
    pages = tables_ptr, stride_table, num_entries, num_blocks
    given = tiles_ptr, lengths_ptr, sinks_ptr, window, scale, softcap
    made = out_ptr, parts_ptr, sums_ptr
    # The outer conditions are compile-time, so an unused kind of tile is not compiled.
    if LONG:  # noqa: SIM102
        if program < num_long:
            _attend(
                *(
                    program,
                    0,
                    0,
                    query,
                    keys,
                    values,
                    pages,
                    given,
                    made,
                    kv_head,
                    kv_heads * G,
                    LONG,
                    0,
                ),
                *(
                    G,
                    CAUSAL,
                    WINDOW,
                    SOFTCAP,
                    SINKS,
                    SHARED,
                    WIDE,
                    CODES,
                    KEYS,
                    SLOTS,
                    DIM,
                    D,
                    E,
                    VALUE_DIM,
                    V,
                    U,
                ),
            )
    if SHORT:  # noqa: SIM102
        if program >= num_long:
            piece = program - num_long
            tile, part = num_long + piece // segments, piece.to(tl.int64) * kv_heads + kv_head
            _attend(
                *(
                    tile,
                    piece % segments,
                    part,
                    query,
                    keys,
                    values,
                    pages,
                    given,
                    made,
                    kv_head,
                    kv_heads * G,
                ),
                *(SHORT, SPLIT, G, CAUSAL, WINDOW, SOFTCAP, SINKS, SHARED, WIDE, CODES),
                *(KEYS, SLOTS, DIM, D, E, VALUE_DIM, V, U),
            )


@triton.jit(do_not_specialize=_VARIES)
def merge_segments(
    out_ptr,
    parts_ptr,
    sums_ptr,
    tiles_ptr,
    lengths_ptr,
    sinks_ptr,
    num_entries,
    num_long,
    segments,
    window,
    SHORT: tl.constexpr,
    SPLIT: tl.constexpr,
    G: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    SLOTS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Merge the segments of a line of a short tile and key head, `CHUNK` at a time, first to last.

    There is a program per tile, line and key head.
    """
    tile, line, kv_head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_heads = tl.num_programs(2)
    _, token_L, head_L, mask_L, _, _, lo, hi, _ = _tile(
        tiles_ptr, num_long + tile, lengths_ptr, window, SHORT, G, CAUSAL, WINDOW
    )
    mine_L = tl.arange(0, SHORT) == line
    there = tl.max((mine_L & mask_L).to(tl.int32), 0) > 0
    token = tl.sum(tl.where(mine_L, token_L, 0), 0)
    head = tl.sum(tl.where(mine_L, head_L, 0), 0) + kv_head * G
    hi = tl.minimum(hi, num_entries * SLOTS)
    count = (hi - 1) // SPLIT - lo // SPLIT + 1
    if there & (count > 1):
        at_V = tl.arange(0, BLOCK)
        top, total, out_V = float("-inf"), 0.0, tl.zeros([BLOCK], tl.float32)
        if SINKS:
            top, total = tl.load(sinks_ptr + head) * LOG2_E, 1.0
        for base in range(0, count, CHUNK):
            z = base + tl.arange(0, CHUNK)
            piece_Z = ((tile * segments + z).to(tl.int64) * kv_heads + kv_head) * SHORT + line
            max_Z = tl.load(sums_ptr + piece_Z * 2, mask=z < count, other=float("-inf"))
            sum_Z = tl.load(sums_ptr + piece_Z * 2 + 1, mask=z < count, other=0.0)
            part_ZV = tl.load(
                parts_ptr + piece_Z[:, None] * VALUE_DIM + at_V[None, :],
                mask=(z < count)[:, None] & (at_V < VALUE_DIM)[None, :],
                other=0.0,
            )
            new = tl.maximum(top, tl.max(max_Z, 0))
            below = tl.where(new == float("-inf"), 0.0, new)
            decay, decay_Z = tl.exp2(top - below), tl.exp2(max_Z - below)
            total = total * decay + tl.sum(sum_Z * decay_Z, 0)
            out_V = out_V * decay + tl.sum(part_ZV * decay_Z[:, None], 0)
            top = new
        to = out_ptr + (token.to(tl.int64) * kv_heads * G + head) * VALUE_DIM
        tl.store(to + at_V, out_V / total, mask=at_V < VALUE_DIM)
