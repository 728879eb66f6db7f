// Makes elements. Everything that is shown goes in as text: nothing becomes markup.

const SVG = "http://www.w3.org/2000/svg";

// `attributes`: by name, null for those that it does not have. `children`: elements and texts.
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

// Changes a text only where it differs: what is selected stays selected, and screen readers are told nothing twice.
export function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Makes `wanted` the children, in this order. Those that stay where they are keep the focus.
export function arrange(parent, wanted) {
  for (const child of [...parent.children]) if (!wanted.includes(child)) child.remove();
  const focused = document.activeElement;
  for (const [index, child] of wanted.entries()) {
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] ?? null);
  }
  if (focused !== document.activeElement && parent.contains(focused)) focused.focus({ preventScroll: true });
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) if (value !== null) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
