// Keeps the message that is being written, with its files, over reloads.

import { readDraft, writeDraft } from "../conversations/store.js";

const TEXT = "motet-draft";

export const draftText = () => localStorage.getItem(TEXT) ?? "";

export function keepText(text) {
  if (text) localStorage.setItem(TEXT, text);
  else localStorage.removeItem(TEXT);
}

// Returns the attachments of `keepFiles`; none where the browser stores nothing.
export const draftFiles = () => readDraft().catch(() => []);

// Resolves when `items`, of files.js, are stored; where the browser stores nothing, too: they are still shown.
export const keepFiles = (items) => writeDraft(items).catch(() => {});
