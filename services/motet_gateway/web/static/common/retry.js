// Loads the page again while one of its scripts cannot be loaded: a gateway that restarts refuses connections for a moment, and
// browsers try a script once. A classic script, so that it hears of modules that fail.
"use strict";
{
  const TRIES = 5;
  const DELAY = 1000; // ms
  const KEY = "motet-page-tries";
  let waiting = false;
  const retry = ({ target }) => {
    const tries = Number(sessionStorage.getItem(KEY) ?? 0);
    if (!(target instanceof HTMLScriptElement) || waiting || tries >= TRIES) return;
    waiting = true;
    sessionStorage.setItem(KEY, tries + 1);
    setTimeout(() => location.reload(), DELAY);
  };
  addEventListener("error", retry, true); // errors of elements do not bubble
  addEventListener("load", () => waiting || sessionStorage.removeItem(KEY));
}
