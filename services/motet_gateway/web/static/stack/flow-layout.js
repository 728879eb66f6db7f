// Lays the services out as a tree along a request's path: from left to right, or as an indented list where there is less room.

// The service that calls each one. Services without an entry serve no request.
const CALLER = {
  clients: null,
  gateway: "clients",
  tokenizer: "gateway",
  decode: "tokenizer",
  prefill: "decode",
  encoder: "tokenizer",
  vad: "gateway",
  asr: "gateway",
  speakers: "gateway",
  tts: "gateway",
  diffusion: "gateway",
  embedding: "gateway",
  ranking: "gateway",
};

export const BOX = { width: 176, height: 62 };
const GAP = { column: 56, row: 10, indent: 26 };

// Returns {places: [{role, x, y}], edges: [{from, to, path}], width, height} of the services that exist. `wide`: from left to right.
export function layOut(roles, wide) {
  const shown = Object.keys(CALLER).filter((role) => role === "clients" || roles.has(role));
  const tree = shown.map((role) => ({ role, from: callerOf(role, shown) }));
  const places = new Map();
  const place = wide ? placeInColumns : placeInRows;
  place(tree, "clients", 0, places);
  const edges = tree.filter(({ from }) => from).map(({ role, from }) => ({ from, to: role, path: (wide ? curve : elbow)(places.get(from), places.get(role)) }));
  const all = [...places.values()];
  const size = (side, length) => Math.max(...all.map((one) => one[side])) + length + 2;
  return { places: all, edges, width: size("x", BOX.width), height: size("y", BOX.height) };
}

// Returns the nearest caller that exists; null for the first of all.
function callerOf(role, shown) {
  let from = CALLER[role];
  while (from && !shown.includes(from)) from = CALLER[from];
  return from;
}

const calledBy = (tree, role) => tree.filter(({ from }) => from === role).map((one) => one.role);

// A service is below the one before it in its column, and not above its caller.
function placeInColumns(tree, role, depth, places, top = 1) {
  const x = 1 + depth * (BOX.width + GAP.column);
  const above = [...places.values()].filter((one) => one.x === x).map((one) => one.y + BOX.height + GAP.row);
  const y = Math.max(top, ...above);
  places.set(role, { role, x, y });
  for (const one of calledBy(tree, role)) placeInColumns(tree, one, depth + 1, places, y);
}

function placeInRows(tree, role, depth, places) {
  places.set(role, { role, x: 1 + depth * GAP.indent, y: 1 + places.size * (BOX.height + GAP.row) });
  for (const one of calledBy(tree, role)) placeInRows(tree, one, depth + 1, places);
}

function curve(from, to) {
  const [x, y] = [from.x + BOX.width, from.y + BOX.height / 2];
  const [endX, endY] = [to.x, to.y + BOX.height / 2];
  const middle = (x + endX) / 2;
  return `M${x} ${y}C${middle} ${y} ${middle} ${endY} ${endX} ${endY}`;
}

function elbow(from, to) {
  const x = from.x + GAP.indent / 2;
  return `M${x} ${from.y + BOX.height}V${to.y + BOX.height / 2}H${to.x}`;
}
