"use strict";
// A page of a run under way reads its own file again, and then shows what it showed before.

const KEPT = `kept ${location.pathname}`;
const parts = []; // [name, () => state, (state) => anything]

/** Let a part of the page outlive a reload. */
function keep(name, get, set) {
  parts.push([name, get, set]);
}

/** Let details stay opened or closed; name: no two alike. */
function keepOpen(details, name) {
  keep(`open: ${name}`, () => details.open, (open) => { details.open = open; });
}

function storeKept() {
  try {
    sessionStorage.setItem(KEPT, JSON.stringify(Object.fromEntries(parts.map(([name, get]) => [name, get()]))));
  } catch { /* no storage here: the page then begins anew */ }
}

/** Called once everything is built; what was kept is used up. */
function restoreKept() {
  let state = null;
  try {
    state = JSON.parse(sessionStorage.getItem(KEPT));
    sessionStorage.removeItem(KEPT);
  } catch { /* as without any */ }
  if (state) for (const [name, , set] of parts) if (state[name] !== undefined) set(state[name]);
}

/** Reload on a timer; not while somebody types, clicks or has text selected. */
function reloadOften() {
  if (!page.reload_seconds) return;
  let busy = 0;
  let leaving = false;
  // As late as can be: what is chosen until the very end is kept as well.
  window.addEventListener("pagehide", () => { if (leaving) storeKept(); });
  for (const kind of ["keydown", "pointerdown", "input"]) window.addEventListener(kind, () => { busy = Date.now(); });
  const again = () => {
    if (document.hidden || Date.now() - busy < 2000 || !getSelection().isCollapsed) {
      setTimeout(again, 500);
      return;
    }
    leaving = true;
    location.reload();
  };
  setTimeout(again, 1000 * page.reload_seconds);
}
