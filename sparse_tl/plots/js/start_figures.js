// Calls start(root, data) for every copy of a figure that has not been started yet.
function startFigures(id, start, data) {
  "use strict";
  const roots = document.querySelectorAll(`[data-figure="${id}"]:not([data-ready])`);
  for (const root of roots) {
    root.setAttribute("data-ready", "");
    start(root, data);
  }
}
