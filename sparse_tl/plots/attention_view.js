// Puts circuitsvis's attention heads in the place of the static heat maps, in every copy of the
// figure on the page that has not been started yet.
function startAttention(id, properties, title) {
  const roots = document.querySelectorAll(`[data-figure="${id}"]:not([data-ready])`);
  for (const root of roots) {
    const browser = root.querySelector(".browser");
    browser.id = `sparse-tl-attention-${Math.random().toString(36).slice(2)}`;
    if (title) {
      const heading = document.createElement("h3");
      heading.style.cssText = "margin: 8px 24px 0; font-size: 18px";
      heading.textContent = title;
      browser.before(heading);
    }
    CircuitsVis.render(browser.id, CircuitsVis.AttentionHeads, properties);
    root.querySelector(".static").hidden = true;
    root.setAttribute("data-ready", "");
  }
}
