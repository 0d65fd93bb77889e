// Scrolls a figure that is wider than its container to its prediction, and keeps its names in view.
//   names()   elements at its left, which move along
//   between() the ends of the range to show, in pixels of the figure
// Returns a function for a figure that was drawn again, which can scroll to that range.
function followScrolling(svg, names, between) {
  const MARGIN = 8;
  const canvas = svg.parentElement;
  // The left edge of what is in view, in pixels of the figure.
  const edge = () => pointIn(svg, { clientX: canvas.getBoundingClientRect().left, clientY: 0 }).x;
  let known = 0;

  function reveal() {
    const scale = svg.getScreenCTM()?.a || 1, start = edge();
    const [left, right] = between().map((x) => canvas.scrollLeft + (x - start) * scale);
    canvas.scrollLeft = Math.min(left, Math.max(canvas.scrollLeft, right - canvas.clientWidth));
    moveNames();
  }

  function moveNames() {
    const start = edge() + MARGIN;
    for (const name of names()) {
      const x = canvas.scrollLeft && Math.max(0, start - name.getBBox().x);
      setAttributes(name, { transform: x ? `translate(${x} 0)` : null });
    }
  }

  canvas.addEventListener("scroll", moveNames);
  // First called after layout: reading sizes here would force another. A redrawn figure stays scrolled.
  new ResizeObserver(() => {
    const before = known;
    known = canvas.clientWidth;
    if (known !== before) (!before && canvas.scrollLeft ? moveNames : reveal)();
  }).observe(canvas);
  return (toRange) => (toRange ? reveal : moveNames)();
}
