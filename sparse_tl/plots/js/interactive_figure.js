// Shared by interactive figures: elements, controls, the tooltip.

function setAttributes(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null) element.removeAttribute(name);
    else element.setAttribute(name, String(value));
  }
}

// An element with attributes (listeners if the name starts with "on") and children.
function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null) element.setAttribute(name, String(value));
  }
  element.append(...children);
  return element;
}

// A figure for start(): what a page has, without the static picture.
function emptyFigure() {
  const root = make("div", { class: "sparse-tl-circuit", "data-ready": true });
  root.innerHTML = '<div class="controls"></div><div class="canvas"><svg aria-label="diagram"></svg></div>' +
    '<div class="tip" role="tooltip" hidden></div>';
  return root;
}

// The panels of a figure, each with its SVG group, its parts by role, and a path over its lines
// that marks the line under the pointer.
function findPanels(svg, data, pointed) {
  return data.panels.map((panel) => {
    const group = svg.querySelector(`g[data-panel="${panel.index}"]`);
    const part = (role) => group.querySelector(`[data-role="${role}"]`);
    const hover = document.createElementNS("http://www.w3.org/2000/svg", "path");
    setAttributes(hover, {
      "data-role": "hover", fill: "none", stroke: pointed, "stroke-linecap": "round",
      "pointer-events": "none",
    });
    part("nodes").before(hover);
    return { ...panel, group, part, hover };
  });
}

// Makes a node a button: a click, Enter or the space bar press it, and arrow keys move to the next of
// all nodes of its panel. Tab reaches one of them.
function addButton(element, label, reachedByTab, press, all) {
  setAttributes(element, {
    tabindex: reachedByTab ? 0 : -1, role: "button", "aria-label": label,
  });
  element.addEventListener("click", press);
  element.addEventListener("keydown", (event) => {
    const pressed = event.key === "Enter" || event.key === " ";
    const other = pressed ? null : neighbour(element, all, event.key);
    if (pressed) press(event);
    if (other) {
      element.setAttribute("tabindex", -1);
      other.setAttribute("tabindex", 0);
      other.focus();
    }
    if (pressed || other) event.preventDefault();
  });
}

// The next element in the same row, or the nearest one in the next row.
function neighbour(element, all, key) {
  const SAME_ROW = 4;
  const along = { ArrowLeft: -1, ArrowRight: 1 }[key];
  const across = { ArrowUp: -1, ArrowDown: 1 }[key];
  if (!along && !across) return null;
  const [here, ...boxes] = [element, ...all].map((other) => other.getBoundingClientRect());
  const ahead = boxes.map((box, index) => ({
    other: all[index], dx: (box.left + box.right - here.left - here.right) / 2,
    dy: Math.abs(box.top - here.top) < SAME_ROW ? 0 : Math.round(box.top - here.top),
  })).filter(({ other, dx, dy }) => other.getClientRects().length && (along ? dy === 0 && along * dx > 0 : across * dy > 0));
  const far = ({ dx, dy }) => 10000 * Math.abs(dy) + Math.abs(dx);
  return ahead.sort((a, b) => far(a) - far(b))[0]?.other ?? null;
}

function addControl(root, text, ...controls) {
  root.querySelector(".controls").append(make("label", {}, text, ...controls));
}

// A menu of [value, label] pairs; onChange receives the value as text.
function addSelect(root, text, name, options, value, onChange) {
  const choices = options.map(([option, label]) => new Option(label, option));
  const select = make("select", { name, onchange: () => onChange(select.value) }, ...choices);
  select.value = String(value);
  addControl(root, text, select);
  return select;
}

// Calls reset() on Escape, as long as a figure is on the page.
function onEscape(root, reset) {
  document.addEventListener("keydown", function listener(event) {
    // A notebook removes the figure when its cell runs again.
    if (!root.isConnected) document.removeEventListener("keydown", listener);
    else if (event.key === "Escape") reset();
  });
}

function panelAt(panels, { target }) {
  const { panel } = target.closest("g[data-panel]")?.dataset ?? {};
  return panels.find(({ index }) => String(index) === panel);
}

function hideTip(root, panels) {
  root.querySelector(".tip").hidden = true;
  for (const panel of panels) panel.hover.removeAttribute("d");
}

// Shows lines of text, the first of them bold, beside a point given as {clientX, clientY}.
function showTip(root, lines, { clientX, clientY }) {
  const tip = root.querySelector(".tip");
  tip.replaceChildren(make("strong", {}, lines[0]), "\n" + lines.slice(1).join("\n"));
  tip.hidden = false;
  const box = root.getBoundingClientRect();
  const x = clientX - box.left + 14;
  const flipped = x + tip.offsetWidth > box.width;
  tip.style.left = `${Math.max(0, flipped ? x - tip.offsetWidth - 28 : x)}px`;
  const y = clientY - box.top + 14;
  const raised = clientY + 14 + tip.offsetHeight > window.innerHeight;
  tip.style.top = `${Math.max(0, raised ? y - tip.offsetHeight - 28 : y)}px`;
}

// A point of the page in the coordinates of an SVG element.
function pointIn(element, { clientX, clientY }) {
  return new DOMPoint(clientX, clientY).matrixTransform(element.getScreenCTM().inverse());
}

const PEN = document.createElement("canvas").getContext("2d");

// The line nearest to a point, within six pixels; lines on a path take precedence over light ones.
function nearestLine(lines, { x, y }) {
  let found = lines;
  for (const reach of [6, 4, 3, 2]) {
    PEN.lineWidth = 2 * reach;
    const nearer = found.filter((line) => {
      line.shape ??= new Path2D(line.d);
      return PEN.isPointInStroke(line.shape, x, y);
    });
    if (!nearer.length) break;
    found = nearer;
  }
  return found === lines ? null : found.find((line) => line.onPath) ?? found[0];
}
