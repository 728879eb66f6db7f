// Formats numbers.

export const count = (value) => (value >= 1e4 ? value.toExponential(1) : String(Math.round(value * 10) / 10));
export const rate = (value) => (value >= 100 ? Math.round(value).toString() : value.toFixed(value >= 10 ? 1 : 2));
export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)}%`;
export const money = (amount) => (amount >= 100 ? Math.round(amount).toString() : amount.toPrecision(3));

// 840 µs, 12.5 ms, 240 ms, 1.24 s
export function duration(seconds) {
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  const ms = seconds * 1000;
  if (ms >= 1) return `${ms >= 100 ? Math.round(ms) : ms.toFixed(1)} ms`;
  return `${Math.round(ms * 1000)} µs`;
}

export const plural = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
