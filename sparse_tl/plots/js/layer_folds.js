// Unfolds layers of a circuit diagram: on a click, or if a line is drawn in them. Everything below them
// moves down. attention_svg.py chooses the folds of the first view.

// Makes the bands of a panel buttons; redraw() is called after a click.
function addFoldButtons(svg, panels, panel, redraw) {
  for (const band of panel.part("folds").children) {
    const press = () => {
      unfold(svg, panels, panel, foldOf(panel, band));
      redraw();
    };
    addButton(band, foldText(panel, band).join(", "), true, press, [band]);
  }
}

function foldOf(panel, band) {
  return panel.folds.find(([, last]) => last === Number(band.dataset.last));
}

function foldText(panel, band) {
  return [`Layers ${foldOf(panel, band).join(" to ")}`, "nothing is drawn here", "click to unfold"];
}

function unfoldLayersOf(svg, panels, panel, lines) {
  for (const fold of panel.folds) {
    const isInside = ({ layer }) => fold[0] <= layer && layer <= fold[1];
    if (lines.some(isInside)) unfold(svg, panels, panel, fold);
  }
}

function unfold(svg, panels, panel, fold) {
  const [first, last] = fold;
  const { levels, row } = panel;
  const grown = row * (last - first);
  panel.folds = panel.folds.filter((other) => other !== fold);
  panel.levels = levels.map((y, level) => y + row * Math.max(0, last - Math.max(level, first)));
  const place = (element, name, level) => {
    move(element, name, panel.levels[level] - levels[level]);
    if (first < level && level <= last) element.removeAttribute("display");
  };
  panel.part("folds").querySelector(`[data-last="${last}"]`).remove();
  for (const band of panel.part("folds").children) place(band, "y", Number(band.dataset.last) + 1);
  for (const circle of panel.part("nodes").children) place(circle, "cy", Number(circle.dataset.level));
  for (const square of panel.part("mlps")?.children ?? []) place(square, "y", Number(square.dataset.level));
  [...panel.part("layers").children].forEach((name, layer) => {
    place(name, "y", layer + 1);
    if (layer === last) name.textContent = name.dataset.own;
  });
  const streams = panel.part("residual").getAttribute("d");
  panel.part("residual").setAttribute("d", streams.replaceAll(/ \d+V/g, ` ${panel.levels[0]}V`));
  move(panel.group.querySelector("rect"), "height", grown);
  const below = panels.slice(panel.index + 1).map(({ group }) => group);
  for (const element of [panel.part("input"), ...below, svg.querySelector("[data-role=legend]")]) {
    moveDown(element, grown);
  }
  stretch(svg, grown);
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
  const before = Number(svg.dataset.height ??= svg.viewBox.baseVal.height);
  for (const element of [svg, svg.querySelector("rect")]) move(element, "height", by);
  const height = svg.getAttribute("height");
  svg.setAttribute("viewBox", `0 0 ${svg.viewBox.baseVal.width} ${height}`);
  const name = svg.querySelector("[data-role=transition-name]");
  if (name) moveDown(name, by / 2);
  for (const arrow of svg.querySelectorAll("[data-role=transition]")) {
    arrow.setAttribute("transform", `scale(1 ${height / before})`);
  }
}
