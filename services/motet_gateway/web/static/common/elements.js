// Creates elements. All content is set as text; nothing becomes markup.

const SVG = "http://www.w3.org/2000/svg";

// `attributes`: by name; null omits one. `children`: elements and texts.
export function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

// Changes a text only if it differs, so that selections survive and screen readers announce nothing twice.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Replaces the children, in this order; elements that remain keep the focus.
export function arrange(parent, children) {
  for (const child of [...parent.children]) if (!children.includes(child)) child.remove();
  const focused = document.activeElement;
  for (const [index, child] of children.entries()) {
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] ?? null);
  }
  if (focused !== document.activeElement && parent.contains(focused)) focused.focus({ preventScroll: true });
}

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) if (value !== null) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
