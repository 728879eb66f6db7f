// Copies text, and says so on the button that was pressed.

const SHOWN = 1500; // ms

// `button`: its text or its label changes for a moment. Browsers have `navigator.clipboard` on https and loopback only.
export async function copyText(text, button) {
  if (navigator.clipboard) await navigator.clipboard.writeText(text).catch(() => copySelected(text));
  else copySelected(text);
  const labelled = button.hasAttribute("aria-label");
  const before = labelled ? button.getAttribute("aria-label") : button.textContent;
  if (before === "Copied") return;
  const set = (label) => (labelled ? button.setAttribute("aria-label", label) : (button.textContent = label));
  set("Copied");
  button.classList.add("done");
  setTimeout(() => {
    set(before);
    button.classList.remove("done");
  }, SHOWN);
}

function copySelected(text) {
  const field = Object.assign(document.createElement("textarea"), { value: text, className: "hidden" });
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}
