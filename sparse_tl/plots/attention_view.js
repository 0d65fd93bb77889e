// Offers circuitsvis's attention heads below the static maps, in every copy of the figure on the page
// that has not been started yet. They are drawn when they are opened.
function startAttention(id, properties) {
  const roots = document.querySelectorAll(`[data-figure="${id}"]:not([data-ready])`);
  for (const root of roots) {
    const details = root.querySelector("details");
    const browser = root.querySelector(".browser");
    browser.id = `sparse-tl-attention-${Math.random().toString(36).slice(2)}`;
    details.addEventListener(
      "toggle",
      () => CircuitsVis.render(browser.id, CircuitsVis.AttentionHeads, properties),
      { once: true },
    );
    details.hidden = false;
    root.setAttribute("data-ready", "");
  }
}
