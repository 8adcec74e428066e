"use strict";
// Tabs: what the page begins with.

function start() {
  const tabs = [summaryTab(), curvesTab(), settingsTab(), readerTab(), evaluationsTab()].filter((tab) => tab !== null);
  const [bar, panels] = [document.getElementById("tabs"), document.getElementById("panels")];
  const choose = (place, focus = false) => {
    tabs.forEach((tab, n) => {
      tab.button.setAttribute("aria-selected", String(n === place));
      tab.button.tabIndex = n === place ? 0 : -1;
      tab.panel.hidden = n !== place;
    });
    tabs[place].button.scrollIntoView({ block: "nearest", inline: "nearest" });
    if (focus) tabs[place].button.focus();
    tabs[place].show?.();
    start.shown = tabs[place];
  };
  tabs.forEach((tab, place) => {
    const id = tab.name.toLowerCase();
    tab.button = h("button", { type: "button", role: "tab", id: `tab-${id}`, "aria-controls": id, onclick: () => choose(place) }, tab.name);
    tab.panel = h("section", { role: "tabpanel", id, "aria-labelledby": `tab-${id}`, hidden: true }, tab.element);
    bar.append(tab.button);
    panels.append(tab.panel);
  });
  bar.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (by) choose((tabs.indexOf(start.shown) + by + tabs.length) % tabs.length, true);
  });
  window.addEventListener("resize", () => start.shown.show?.());
  choose(Math.max(0, tabs.findIndex((tab) => `#${tab.name.toLowerCase()}` === location.hash)));
}

themes();
start();
