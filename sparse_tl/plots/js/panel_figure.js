// What diagrams of framed panels share: the width of texts, markup, frames, arrows between panels, and
// the legend. In the browser, and in Python for static files.

const LEFT = 8, TOP = 8, TITLE = 34, GAP = 18, ARROW_LEFT = 76;
const NARROW = new Set("ijlrtfI.,:;'|!()[]` /\\"), WIDE = new Set("mwMWQO@%+=<>~^#\u2026\u2423\u237d");
const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
// Characters that are invisible, change the direction of a text, or are not allowed in XML.
const UNPRINTABLE = /[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}\ufffe\uffff]/gu;

// ---- texts, as measured by token_text.py -------------------------------------------------------

function textWidth(text, size) {
  let em = 0;
  for (const c of text) {
    // East Asian letters are wide; dashes and arrows in this range are not.
    const code = c.codePointAt(0), isWide = code >= 0x1100 && !(code >= 0x2000 && code < 0x2e80);
    if (code >= 0x300 && /\p{Mn}/u.test(c)) continue; // above another letter
    em += isWide || WIDE.has(c) ? 1 : NARROW.has(c) ? 0.42
      : c !== c.toLowerCase() ? 0.76 : 0.64;
  }
  return size * em;
}

function clipText(text, size, room) {
  if (textWidth(text, size) <= room) return text;
  const letters = [...text.slice(0, 400)];
  while (letters.length > 1 && textWidth(letters.join("") + "\u2026", size) > room) letters.pop();
  return letters.join("") + "\u2026";
}

// The words of a text in lines that fit.
function wrapText(text, size, room) {
  const lines = [];
  for (const word of text.split(" ")) {
    const longer = `${lines[lines.length - 1]} ${word}`;
    if (lines.length && textWidth(longer, size) <= room) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  return lines.map((line) => clipText(line, size, room));
}

// ---- markup ------------------------------------------------------------------------------------

// Any text, escaped for an element or attribute.
const escaped = (text) => String(text).replace(UNPRINTABLE, "\ufffd").replace(/[&<>"]/g, (c) => ESCAPES[c]);

// An element around markup, without attributes that are null; use svgText for text.
function svgElement(tag, attributes, ...markup) {
  const written = Object.entries(attributes).filter(([, value]) => value !== null).map(([name, value]) =>
    ` ${name}="${typeof value === "number" ? Math.round(100 * value) / 100 : escaped(value)}"`);
  const start = `<${tag}${written.join("")}`;
  return markup.length ? `${start}>${markup.join("")}</${tag}>` : `${start}/>`;
}

const svgText = (attributes, text) => svgElement("text", attributes, escaped(text));

// The colour at a share of the way from one to another.
function blend(start, end, share) {
  const mixed = [1, 3, 5].map((i) => {
    const [a, b] = [start, end].map((colour) => parseInt(colour.slice(i, i + 2), 16));
    return Math.round(a + (b - a) * share).toString(16).padStart(2, "0");
  });
  return `#${mixed.join("")}`;
}

// ---- around the content ------------------------------------------------------------------------

// A whole figure: its background, its title and its parts.
function figureMarkup(width, height, title, parts) {
  const heading = title ? [svgText({
    x: width / 2, y: 28, "text-anchor": "middle", "font-size": 18, "font-weight": "bold",
  }, clipText(title, 18, width - 40))] : [];
  return [svgElement("rect", { width, height, fill: "#ffffff" }), ...heading, ...parts].join("\n");
}

// The frame of a panel with its name and, below it, lines of a caption.
function frameOf({ left, right, top, height }, name, caption, size, { ink, muted }) {
  return [
    svgElement("rect", { x: left, y: top, width: right - left, height, rx: 7, fill: "#ffffff",
      stroke: ink, "stroke-width": 1.3 }),
    svgText({ x: left + 14, y: top + 24, "font-size": 16, "font-weight": "bold", "data-role": "name" },
      clipText(name, 16, right - left - 28)),
    ...caption.map((line, i) => svgText({ x: left + 14, y: top + 43 + 16 * i, "font-size": size,
      fill: muted, "data-role": "caption" }, line)),
  ];
}

const arrowOf = (line, head, width, ink) => [
  svgElement("path", { fill: "none", stroke: ink, "stroke-width": width, "stroke-linecap": "round", d: line }),
  svgElement("path", { d: head, fill: ink }),
];

// A curved arrow from each panel to the next below it, left of the frames, with their common text.
function arrowsDown(panels, left, text, ink) {
  const edge = left - 6, parts = [];
  const along = ({ top, height }, share) => Math.round(top + share * height);
  panels.slice(1).forEach((lower, i) => {
    const start = along(panels[i], 0.62), end = along(lower, 0.38);
    parts.push(...arrowOf(
      `M${edge} ${start}C${edge - 52} ${start + 12} ${edge - 52} ${end - 12} ${edge - 11} ${end - 2}`,
      `M${edge + 2} ${end}l-17 -12l2 9l-6 9z`, 5, ink));
  });
  const [{ top }, last] = [panels[0], panels[panels.length - 1]];
  const room = last.top + last.height - top - 10;
  const turned = `translate(24 ${top + room / 2 + 5}) rotate(-90)`;
  return [...parts, arrowText(text, 17, room, { transform: turned })];
}

function arrowText(text, most, room, place) {
  const size = Math.max(12, Math.min(most, (most * room) / Math.max(textWidth(text, most), 1)));
  return svgText({ "text-anchor": "middle", "font-size": size, "font-weight": "bold", ...place },
    clipText(text, size, room));
}

// The legend from y = top, in as many lines as it needs, and the bottom of the figure. Entries are
// [symbol, text, role]; a symbol is drawn around y = 0, 20 wide.
function legendMarkup(entries, left, right, top, muted) {
  let x = left + 6, y = top + 18;
  const drawn = entries.map(([symbol, words, role]) => {
    const text = clipText(words, 11.5, right - left - 30), need = 25 + textWidth(text, 11.5);
    if (x > left + 6 && x + need > right) [x, y] = [left + 6, y + 19];
    const place = `translate(${Math.round(10 * x) / 10} ${y})`;
    x += need + 14;
    return svgElement("g", { "data-legend": role ?? null, transform: place }, symbol,
      svgText({ x: 25, y: 4, "font-size": 11.5, fill: muted }, text));
  });
  const bottom = Math.round(entries.length ? y + 19 : top + 10);
  return [svgElement("g", { "data-role": "legend" }, ...drawn), bottom];
}

const lineSample = (stroke, width, more) =>
  svgElement("path", { d: "M1 0h18", stroke, "stroke-width": width, ...more });
