// Offers circuitsvis's attention heads below the static maps. They are drawn when they are opened.
function start(root, properties) {
  const details = root.querySelector("details");
  const browser = root.querySelector(".browser");
  browser.id = `sparse-tl-attention-${Math.random().toString(36).slice(2)}`;
  details.addEventListener(
    "toggle",
    () => CircuitsVis.render(browser.id, CircuitsVis.AttentionHeads, properties),
    { once: true },
  );
  details.hidden = false;
}
