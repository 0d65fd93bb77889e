// Unfolds layers of a circuit diagram: on a click, or if a line is drawn in them. Everything below them
// moves down. diagram_layout.py chooses the folds of the first view.

// Makes the bands of all panels buttons; redraw() is called after a click.
function addFoldButtons(svg, panels, redraw) {
  for (const panel of panels) {
    for (const band of [...panel.part("folds").children]) {
      const press = () => {
        unfold(svg, panels, panel, foldOf(panel, band));
        redraw();
      };
      addButton(band, foldText(panel, band).join(", "), true, press, [band]);
    }
  }
}

function foldOf(panel, band) {
  return panel.folds.find(([, last]) => last === Number(band.dataset.last));
}

function foldText(panel, band) {
  const [first, last] = foldOf(panel, band);
  return [`Layers ${first} to ${last}`, "no attention edge is drawn here", "click to unfold"];
}

function unfoldLayersOf(svg, panels, panel, lines) {
  const layers = new Set(lines.map((line) => line.layer));
  for (const fold of panel.folds) {
    const [first, last] = fold;
    if ([...layers].some((layer) => first <= layer && layer <= last)) unfold(svg, panels, panel, fold);
  }
}

function unfold(svg, panels, panel, fold) {
  const [first, last] = fold;
  const { levels, row } = panel;
  const grown = row * (last - first);
  const isUnfolded = (level) => first < level && level <= last;
  panel.folds = panel.folds.filter((other) => other !== fold);
  panel.levels = levels.map((y, level) =>
    level <= first ? y + grown : isUnfolded(level) ? levels[last + 1] + row * (last + 1 - level) : y);
  const place = (element, name, level) => {
    const y = Number(element.getAttribute(name)) + panel.levels[level] - levels[level];
    setAttributes(element, { [name]: y, ...(isUnfolded(level) ? { display: null } : {}) });
  };
  for (const circle of panel.part("nodes").children) place(circle, "cy", Number(circle.dataset.level));
  for (const square of panel.part("mlps")?.children ?? []) place(square, "y", Number(square.dataset.level));
  [...panel.part("layers").children].forEach((name, layer) => {
    place(name, "y", layer + 1);
    if (first <= layer && layer <= last) name.textContent = name.dataset.own;
  });
  for (const band of [...panel.part("folds").children]) {
    if (Number(band.dataset.last) === last) band.remove();
    else place(band, "y", Number(band.dataset.last) + 1);
  }
  const streams = panel.part("residual").getAttribute("d").match(/M[^ ]+/g);
  panel.part("residual").setAttribute("d", streams.map((start) =>
    `${start} ${panel.levels[0]}V${panel.levels.at(-1)}`).join(""));
  const frame = panel.group.querySelector("rect");
  frame.setAttribute("height", Number(frame.getAttribute("height")) + grown);
  const below = panels.slice(panel.index + 1).map(({ group }) => group);
  for (const element of [panel.part("input"), ...below, svg.querySelector("[data-role=legend]")]) {
    moveDown(element, grown);
  }
  stretch(svg, grown);
}

function moveDown(element, by) {
  element.dataset.moved = Number(element.dataset.moved ?? 0) + by;
  element.setAttribute("transform", `translate(0 ${element.dataset.moved})`);
}

// Makes the figure higher, with its background and the arrows beside the panels.
function stretch(svg, by) {
  const { width, height } = svg.viewBox.baseVal;
  const first = Number(svg.dataset.height ??= height);
  const stretched = height + by;
  setAttributes(svg, { viewBox: `0 0 ${width} ${stretched}`, height: stretched });
  svg.querySelector("rect").setAttribute("height", stretched);
  const name = svg.querySelector("[data-role=transition-name]");
  if (name) moveDown(name, by / 2);
  for (const arrow of svg.querySelectorAll("[data-role=transition]")) {
    arrow.setAttribute("transform", `scale(1 ${stretched / first})`);
  }
}
