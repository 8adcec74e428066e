"use strict";

/** Dark or light: as the system until the button is pressed. */
function themes() {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  let chosen = null; // by the button
  const set = () => {
    document.documentElement.dataset.theme = chosen ?? (dark.matches ? "dark" : "light");
  };
  dark.addEventListener("change", set);
  document.getElementById("theme").addEventListener("click", () => {
    chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    set();
  });
  set();
}

/** Show the title of a tapped token below the page, until the next tap: fingers cannot point. */
function tellWhenTapped() {
  const output = document.getElementById("told");
  document.addEventListener("click", (event) => {
    const token = event.target.closest("pre i");
    output.hidden = !token;
    output.textContent = token ? `${token.textContent.trim()}  ${token.title}` : "";
  });
}
