"use strict";

/** Dark or light: the system's until the button is pressed. */
function themes() {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  let own = null; // chosen by hand; otherwise the system's
  const set = () => { document.documentElement.dataset.theme = own ?? (dark.matches ? "dark" : "light"); };
  dark.addEventListener("change", set);
  document.getElementById("theme").addEventListener("click", () => {
    own = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    set();
  });
  set();
}

/** What a token says when it is pointed at, for fingers too: below the page, until the next. */
function tellWhenTapped() {
  const told = document.getElementById("told");
  document.addEventListener("click", (event) => {
    const found = event.target.closest("pre i");
    told.hidden = !found;
    told.textContent = found ? `${found.textContent.trim()}  ${found.title}` : "";
  });
}
