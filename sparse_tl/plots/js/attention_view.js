// Offers circuitsvis's view of attention heads below the static maps, drawn when it is opened.
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
