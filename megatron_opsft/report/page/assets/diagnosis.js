"use strict";

/** What a token or bar says when it is pointed at, for fingers too: below the page, until the next. */
function tellWhenTapped() {
  const told = document.getElementById("told");
  document.addEventListener("click", (event) => {
    const found = event.target.closest("pre i, .words span, .bar");
    const text = found && (found.getAttribute("title") ?? found.querySelector("title")?.textContent);
    told.hidden = !text;
    told.textContent = text ? `${found.matches(".bar") ? "" : `${found.textContent.trim()}  `}${text}` : "";
  });
}

themes();
tellWhenTapped();
