// Replaces the text of a message by a field, until it is sent again or left as it was.

import { element } from "../common/elements.js";
import { sends } from "./enter-key.js";

// `submit` gets the new text.
export function editMessage(article, content, submit) {
  const text = article.querySelector(".text");
  const field = element("textarea", { class: "edit", rows: "3", "aria-label": "Edited message" });
  const send = element("button", { type: "button" }, "Send again");
  const cancel = element("button", { type: "button", class: "secondary" }, "Cancel");
  const editor = element("div", { class: "editor" }, field, element("div", { class: "row" }, cancel, send));
  const actions = article.querySelector(":scope > .actions");
  const close = () => {
    editor.remove();
    for (const part of [text, actions]) if (part) part.hidden = false;
    actions?.querySelector("button")?.focus();
  };
  const finish = () => field.value.trim() && submit(field.value.trim());
  field.value = content;
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
    else if (sends(event)) {
      event.preventDefault();
      finish();
    }
  });
  cancel.addEventListener("click", close);
  send.addEventListener("click", finish);
  for (const part of [text, actions]) if (part) part.hidden = true;
  text.after(editor);
  field.focus();
}
