// Folds layers of a circuit diagram of a deep model in which nothing is drawn, and unfolds them where a
// line appears, or on a click. Everything below them moves. attention_svg.py folds the first view.

// Folds all runs of at least two layers without a line or an open MLP. A click on one unfolds it, and
// calls redraw().
function foldLayers(svg, columns, panels, panel, lines, redraw) {
  if (!panel.folds) return; // not a deep model
  const squares = [...panel.part("mlps")?.children ?? []];
  const used = new Set([
    ...(panel.unfolded ??= []), ...lines.map(({ layer }) => layer),
    ...squares.map((square) => square.dataset.level - 1),
  ]);
  const [nLayers] = panel.shape;
  const folds = [];
  for (let first = 0, last; first < nLayers; first = last + 1) {
    last = first;
    if (used.has(first)) continue;
    while (last + 1 < nLayers && !used.has(last + 1)) last++;
    if (last > first) folds.push([first, last]);
  }
  if (panel.hasBands && String(folds) === String(panel.folds)) return;
  Object.assign(panel, { folds, hasBands: true });
  placeLevels(svg, panels, panel, squares);
  drawBands(panel, columns, ([first, last]) => {
    for (let layer = first; layer <= last; layer++) panel.unfolded.push(layer);
    redraw();
  });
}

function placeLevels(svg, panels, panel, squares) {
  const { row, folds } = panel;
  const before = panel.levels;
  // Level `last + 1` is above the band of a fold, the others of the fold are inside.
  const hidden = (level) => folds.some(([first, last]) => first < level && level <= last);
  const levels = [...before];
  for (let level = levels.length - 2; level >= 0; level--) {
    levels[level] = levels[level + 1] + (hidden(level + 1) ? 0 : row);
  }
  panel.levels = levels;
  const place = (element, name, level) => {
    move(element, name, levels[level] - before[level]);
    setAttributes(element, { display: hidden(level) ? "none" : null });
  };
  for (const circle of panel.part("nodes").children) place(circle, "cy", Number(circle.dataset.level));
  for (const square of squares) place(square, "y", Number(square.dataset.level));
  [...panel.part("layers").children].forEach((name, layer) => {
    const fold = folds.find(([, last]) => last === layer);
    name.textContent = fold ? `Layers ${fold.join("\u2013")}` : name.dataset.own;
    place(name, "y", layer + 1);
  });
  const streams = panel.part("residual").getAttribute("d");
  panel.part("residual").setAttribute("d", streams.replaceAll(/ \d+V/g, ` ${levels[0]}V`));
  const grown = levels[0] - before[0];
  move(panel.group.querySelector("rect"), "height", grown);
  const below = panels.slice(panel.index + 1).map(({ group }) => group);
  for (const element of [panel.part("input"), ...below, svg.querySelector("[data-role=legend]")]) {
    moveDown(element, grown);
  }
  stretch(svg, grown);
}

// A band over the residual streams in place of each fold, as a button.
function drawBands(panel, columns, unfold) {
  const [x, width] = [columns[0] - 14, columns.at(-1) - columns[0] + 28];
  const height = panel.row - 2 * panel.radii[1] - 4;
  const bands = panel.folds.map((fold) => {
    const band = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    const y = panel.levels[fold[1] + 1] + (panel.row - height) / 2;
    setAttributes(band, { "data-last": fold[1], x, y, width, height, rx: 3, "stroke-dasharray": "3 3" });
    addButton(band, foldText(panel, band).join(", "), true, () => unfold(fold), [band]);
    return band;
  });
  panel.part("folds").replaceChildren(...bands);
}

function foldText(panel, band) {
  const fold = panel.folds.find(([, last]) => last === Number(band.dataset.last));
  return [`Layers ${fold.join(" to ")}`, "nothing is drawn here", "click to unfold"];
}

function move(element, name, by) {
  element.setAttribute(name, Number(element.getAttribute(name)) + by);
}

function moveDown(element, by) {
  element.dataset.moved = Number(element.dataset.moved ?? 0) + by;
  element.setAttribute("transform", `translate(0 ${element.dataset.moved})`);
}

// Makes the figure higher, with its background and the arrows beside the panels.
function stretch(svg, by) {
  const before = Number(svg.dataset.height ??= svg.getAttribute("height"));
  for (const element of [svg, svg.querySelector("rect")]) move(element, "height", by);
  const height = svg.getAttribute("height");
  svg.setAttribute("viewBox", `0 0 ${svg.getAttribute("width")} ${height}`);
  const name = svg.querySelector("[data-role=transition-name]");
  if (name) moveDown(name, by / 2);
  for (const arrow of svg.querySelectorAll("[data-role=transition]")) {
    arrow.setAttribute("transform", `scale(1 ${height / before})`);
  }
}
