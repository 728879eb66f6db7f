// As much of @msgpack/msgpack as examples/javascript uses, for machines that npm cannot serve.

export function encode(value) {
  const parts = [];
  write(value, parts);
  return new Uint8Array(Buffer.concat(parts));
}

function head(parts, length, small, limit, tags) {
  if (length < limit) return parts.push(Buffer.from([small | length]));
  const bytes = tags.length === 3 && length < 256 ? 1 : length < 65536 ? 2 : 4;
  const out = Buffer.alloc(1 + bytes);
  out[0] = tags[tags.length === 3 ? bytes >> 1 : (bytes >> 1) - 1];
  out.writeUIntBE(length, 1, bytes);
  parts.push(out);
}

function write(value, parts) {
  if (value === null || value === undefined) parts.push(Buffer.from([0xc0]));
  else if (typeof value === "boolean") parts.push(Buffer.from([value ? 0xc3 : 0xc2]));
  else if (typeof value === "number") parts.push(number(value));
  else if (typeof value === "string") {
    const bytes = Buffer.from(value, "utf8");
    head(parts, bytes.length, 0xa0, 32, [0xd9, 0xda, 0xdb]);
    parts.push(bytes);
  } else if (Array.isArray(value)) {
    head(parts, value.length, 0x90, 16, [0xdc, 0xdd]);
    for (const item of value) write(item, parts);
  } else {
    const entries = Object.entries(value);
    head(parts, entries.length, 0x80, 16, [0xde, 0xdf]);
    for (const [key, item] of entries) {
      write(key, parts);
      write(item, parts);
    }
  }
}

function number(value) {
  if (Number.isInteger(value) && value >= 0 && value < 128) return Buffer.from([value]);
  const out = Buffer.alloc(Number.isInteger(value) && value >= 0 && value < 2 ** 32 ? 5 : 9);
  if (out.length === 5) {
    out[0] = 0xce;
    out.writeUInt32BE(value, 1);
  } else {
    out[0] = 0xcb;
    out.writeDoubleBE(value, 1);
  }
  return out;
}

export function decode(data) {
  const bytes = Buffer.from(data.buffer, data.byteOffset, data.byteLength);
  let at = 0;
  const uint = (length) => bytes.readUIntBE((at += length) - length, length);
  const slice = (length) => bytes.subarray(at, (at += length));
  const many = (length, make) => Array.from({ length }, make);
  const map = (length) => Object.fromEntries(many(length, () => [read(), read()]));
  const other = {
    0xc0: () => null,
    0xc2: () => false,
    0xc3: () => true,
    0xc4: () => slice(uint(1)),
    0xc5: () => slice(uint(2)),
    0xc6: () => slice(uint(4)),
    0xca: () => bytes.readFloatBE((at += 4) - 4),
    0xcb: () => bytes.readDoubleBE((at += 8) - 8),
    0xcc: () => uint(1),
    0xcd: () => uint(2),
    0xce: () => uint(4),
    0xcf: () => Number(bytes.readBigUInt64BE((at += 8) - 8)),
    0xd0: () => bytes.readInt8((at += 1) - 1),
    0xd1: () => bytes.readInt16BE((at += 2) - 2),
    0xd2: () => bytes.readInt32BE((at += 4) - 4),
    0xd3: () => Number(bytes.readBigInt64BE((at += 8) - 8)),
    0xd9: () => slice(uint(1)).toString("utf8"),
    0xda: () => slice(uint(2)).toString("utf8"),
    0xdb: () => slice(uint(4)).toString("utf8"),
    0xdc: () => many(uint(2), read),
    0xdd: () => many(uint(4), read),
    0xde: () => map(uint(2)),
    0xdf: () => map(uint(4)),
  };
  function read() {
    const tag = uint(1);
    if (tag < 0x80) return tag;
    if (tag >= 0xe0) return tag - 256;
    if (tag < 0x90) return map(tag & 15);
    if (tag < 0xa0) return many(tag & 15, read);
    if (tag < 0xc0) return slice(tag & 31).toString("utf8");
    return other[tag]();
  }
  return read();
}
