// Applies the chosen theme, or else the system's. A classic script, so that it runs before the first paint.
"use strict";
{
  const show = (theme) => {
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
  };
  show(localStorage.getItem("motet-theme"));
  document.addEventListener("DOMContentLoaded", () => {
    const choice = document.getElementById("theme");
    choice.value = document.documentElement.dataset.theme ?? "";
    choice.addEventListener("change", () => {
      localStorage.setItem("motet-theme", choice.value);
      show(choice.value);
    });
  });
}
