// Decides what Enter does in a message: it sends, but on touch screens, whose keyboards have no Shift+Enter, it starts a new line.

export const isTouch = () => matchMedia("(pointer: coarse)").matches;

export const sends = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing && !isTouch();

export const enterHint = () => (isTouch() ? "" : "Enter sends, Shift+Enter starts a new line.");
