// Shows the tooltip of the cell, or of the line's point, that is nearest to the pointer.

function start(root, data) {
  "use strict";
  const svg = root.querySelector("svg");
  svg.addEventListener("pointermove", (event) => {
    const { x, y } = pointIn(svg, event);
    let [nearest, least] = [null, 1];
    for (const [column, row, across, up, lines] of data.targets) {
      const off = Math.max(Math.abs(x - column) / across, Math.abs(y - row) / up);
      if (off <= least) [nearest, least] = [lines, off];
    }
    if (nearest) showTip(root, nearest, event);
    else hideTip(root, []);
  });
  svg.addEventListener("pointerleave", () => hideTip(root, []));
}
