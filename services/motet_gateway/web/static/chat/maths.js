// Recognizes TeX in Markdown: $…$ and \(…\) in a line, $$…$$ and \[…\] in a line or as a block of their own.

const PAIRS = [["$$", "$$", true], ["\\[", "\\]", true], ["\\(", "\\)", false], ["$", "$", false]];

// A plugin of markdown-it. The TeX becomes the text of a <span class="math">, which `typeset` replaces.
export function maths(markdown) {
  markdown.inline.ruler.before("escape", "maths", inlineMaths);
  markdown.block.ruler.before("fence", "maths", blockMaths, { alt: ["paragraph", "reference", "blockquote", "list"] });
  markdown.renderer.rules.maths = (tokens, index) => {
    const { content, meta } = tokens[index];
    return `<span class="math${meta.display ? " display" : ""}">${markdown.utils.escapeHtml(content)}</span>`;
  };
}

function inlineMaths(state, silent) {
  const pair = PAIRS.find(([open]) => state.src.startsWith(open, state.pos));
  if (!pair) return false;
  const [open, close, display] = pair;
  const start = state.pos + open.length;
  const end = state.src.indexOf(close, start);
  if (end < 0 || end + close.length > state.posMax) return false;
  const tex = state.src.slice(start, end);
  if (!tex.trim() || (open === "$" && isPrice(tex, state.src[end + 1]))) return false;
  if (!silent) Object.assign(state.push("maths", "", 0), { content: tex, meta: { display } });
  state.pos = end + close.length;
  return true;
}

// Dollars around spaces, over a line's end or before a digit are prices: "$5 and $6".
const isPrice = (tex, next) => /^\s|\s$|\n/.test(tex) || /\d/.test(next ?? "");

function blockMaths(state, first, last, silent) {
  const line = (at) => state.src.slice(state.bMarks[at] + state.tShift[at], state.eMarks[at]);
  const pair = PAIRS.find(([open, , display]) => display && line(first).startsWith(open));
  if (!pair) return false;
  const [open, close] = pair;
  const lines = [];
  for (let at = first; at < last; at += 1) {
    const text = at === first ? line(at).slice(open.length) : line(at);
    const end = text.trimEnd();
    if (!end.endsWith(close)) {
      lines.push(text);
      continue;
    }
    if (silent) return true;
    lines.push(end.slice(0, -close.length));
    const token = state.push("maths", "", 0);
    Object.assign(token, { block: true, content: lines.join("\n"), meta: { display: true }, map: [first, at + 1] });
    state.line = at + 1;
    return true;
  }
  return false;
}
