// What the interactive figures share: finding the copies on the page, controls, the tooltip.

// Calls start(root, data) for every copy of a figure that has not been started yet.
function startFigures(id, start, data) {
  "use strict";
  const roots = document.querySelectorAll(`[data-figure="${id}"]:not([data-ready])`);
  for (const root of roots) {
    root.setAttribute("data-ready", "");
    start(root, data);
  }
}

const SVG = "http://www.w3.org/2000/svg";

function setAttributes(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null) element.removeAttribute(name);
    else element.setAttribute(name, String(value));
  }
}

// An empty path over the lines of a panel, which shows the line under the pointer.
function addHoverPath(nodes, stroke) {
  const path = document.createElementNS(SVG, "path");
  setAttributes(path, {
    "data-role": "hover", fill: "none", stroke, "stroke-linecap": "round",
    "pointer-events": "none",
  });
  nodes.before(path);
  return path;
}

function addControl(root, text, control, ...rest) {
  const label = document.createElement("label");
  label.append(text, control, ...rest);
  root.querySelector(".controls").append(label);
}

// A choice among [value, label] pairs; onChange gets the value as text.
function addSelect(root, text, name, options, value, onChange) {
  const select = document.createElement("select");
  select.name = name;
  for (const [option, label] of options) select.append(new Option(label, option));
  select.value = String(value);
  select.addEventListener("change", () => onChange(select.value));
  addControl(root, text, select);
  return select;
}

// A slider with its value beside it; onInput gets the number and returns the text to show.
function addSlider(root, text, attributes, value, shown, onInput) {
  const slider = document.createElement("input");
  setAttributes(slider, { type: "range", ...attributes });
  slider.value = String(value);
  const output = document.createElement("output");
  output.textContent = shown;
  slider.addEventListener("input", () => {
    output.textContent = onInput(Number(slider.value));
  });
  addControl(root, text, slider, output);
  return slider;
}

function onEscape(root, action) {
  document.addEventListener("keydown", function listener(event) {
    // A notebook removes the figure when its cell runs again.
    if (!root.isConnected) document.removeEventListener("keydown", listener);
    else if (event.key === "Escape") action();
  });
}

// Shows lines of text, the first of them bold, beside a point given as {clientX, clientY}.
function showTip(root, lines, { clientX, clientY }) {
  const tip = root.querySelector(".tip");
  const heading = document.createElement("strong");
  heading.textContent = lines[0];
  tip.replaceChildren(heading, "\n" + lines.slice(1).join("\n"));
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

function distanceToSegment(x, y, x0, y0, x1, y1) {
  const [dx, dy] = [x1 - x0, y1 - y0];
  const along = ((x - x0) * dx + (y - y0) * dy) / (dx * dx + dy * dy || 1);
  const t = Math.max(0, Math.min(1, along));
  return Math.hypot(x - x0 - t * dx, y - y0 - t * dy);
}
