// What a reader of this page cannot see; and every text, with its size, colours and place.
() => {
  const problems = [];
  const texts = [];
  const style = document.createElement("style");
  style.textContent = "* { pointer-events: fill !important; }";
  document.head.append(style);
  const wide = document.documentElement.scrollWidth;
  if (wide > innerWidth) problems.push(`the page is ${wide} px wide`);
  const parts = (colour) => {
    const found = colour.match(/[\d.]+/g);
    return found && colour.startsWith("rgb") ? found.map(Number) : null;
  };
  const above = (element) => {
    const found = [];
    for (let e = element; e; e = e.parentElement) found.push(e);
    return found;
  };
  // The opaque paint of an element behind a text, if it has one.
  const paint = (element) => {
    const s = getComputedStyle(element);
    const isShape = element instanceof SVGGeometryElement;
    const colour = parts(isShape ? s.fill : s.backgroundColor);
    const opacity = (colour?.[3] ?? 1) * s.opacity * (isShape ? s.fillOpacity : 1);
    return colour && opacity > 0.5 ? colour.slice(0, 3) : null;
  };
  // The boxes of a slanted text: one for each letter, since one around it all is mostly empty.
  const lettersOf = (element, m) => Array.from({ length: element.getNumberOfChars() }, (_, i) => {
    const { x, y, width, height } = element.getExtentOfChar(i);
    const ends = [[x, y], [x + width, y], [x, y + height], [x + width, y + height]];
    const points = ends.map(([x, y]) => new DOMPoint(x, y).matrixTransform(m));
    const [xs, ys] = [points.map((p) => p.x), points.map((p) => p.y)];
    return [Math.min(...xs), Math.min(...ys), Math.max(...xs), Math.max(...ys)];
  });
  for (const element of document.body.querySelectorAll(":not(svg *)")) {
    const scrolls = element.scrollWidth > element.clientWidth + 1 && element.clientWidth > 0;
    if (scrolls && getComputedStyle(element).overflowX !== "visible")
      problems.push(`${element.className || element.tagName} has to be scrolled sideways`);
  }
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    const element = node.parentElement;
    if (!node.data.trim() || element.closest("script, style, noscript, option, title, desc")) continue;
    if (!element.checkVisibility({ visibilityProperty: true, opacityProperty: true })) continue;
    const s = getComputedStyle(element);
    const range = document.createRange();
    range.selectNodeContents(node);
    const box = range.getBoundingClientRect();
    if (!box.width) continue;
    const text = node.data.trim();
    const svg = element.closest("svg");
    const m = svg ? (element.getScreenCTM?.() ?? svg.getScreenCTM()) : null;
    const scale = m ? Math.sqrt(Math.abs(m.a * m.d - m.b * m.c)) : 1;
    let around = { left: 0, right: innerWidth, top: -Infinity, bottom: Infinity };
    if (svg) {
      const frame = svg.getBoundingClientRect();
      around = { left: Math.max(frame.left, 0), right: Math.min(frame.right, innerWidth) };
      Object.assign(around, { top: frame.top, bottom: frame.bottom });
    }
    const isIn = box.left >= around.left - 1 && box.right <= around.right + 1;
    if (!isIn || box.top < around.top - 3 || box.bottom > around.bottom + 3)
      problems.push(`${text} is cut off`);
    const [x, y] = [box.left + box.width / 2, box.top + box.height / 2];
    const own = new Set(above(element).filter((e) => e instanceof SVGTextContentElement));
    const behind = document.elementsFromPoint(x, y).filter((e) => !own.has(e));
    const isText = (e) => e instanceof SVGTextContentElement;
    const found = behind.filter((e) => !isText(e)).map(paint).find((p) => p);
    const ground = found ?? parts(getComputedStyle(document.documentElement).backgroundColor);
    const ink = parts(svg ? s.fill : s.color);
    const inside = above(element);
    const opacity = inside.reduce((o, e) => o * getComputedStyle(e).opacity, ink[3] ?? 1);
    const base = ground[3] === 0 ? [255, 255, 255] : ground.slice(0, 3);
    texts.push({
      text,
      size: parseFloat(s.fontSize) * scale,
      ink: base.map((g, i) => g + (ink[i] - g) * opacity),
      ground: base,
      turned: inside.filter((e) => getComputedStyle(e).filter !== "none").length % 2 === 1,
      boxes: m && Math.abs(m.a * m.b) > 1e-3 ? lettersOf(element, m) :
        [[box.left, box.top, box.right, box.bottom]],
    });
  }
  style.remove();
  return { problems, texts };
}
