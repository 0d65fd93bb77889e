// Which circuit edges a component diagram shows, which of them are on a path, and what is before and
// after a chosen node, by the rules of drawn_circuit.py.

// The strongest edges; without scores there is no order in which to leave any out.
function shownEdges(panel, state) {
  return panel.scored ? panel.edges.slice(0, state.edges) : panel.edges;
}

// All nodes that can be reached from one over the edges, upwards or downwards, itself included.
function reach(data, edges, start, upwards) {
  const following = data.nodes.map(() => []);
  for (const edge of edges) {
    for (const reader of edge.readers) {
      if (upwards) following[edge.source].push(reader);
      else following[reader].push(edge.source);
    }
  }
  const reached = new Set([start]);
  // A set that grows is walked to its new end.
  for (const node of reached) following[node].forEach((next) => reached.add(next));
  return reached;
}

function selectView(panel, data, state) {
  const edges = shownEdges(panel, state);
  const end = (name) => data.nodes.findIndex((node) => node.name === name);
  const above = reach(data, edges, end("input"), true);
  const below = reach(data, edges, end("logits"), false);
  const between = (node) => above.has(node) && below.has(node);
  const linesOnPath = edges.map(
    (edge) => edge.readers.map((reader) => between(edge.source) && between(reader)),
  );
  const onPath = linesOnPath.map((lines) => lines.includes(true));
  const drawn = new Set(edges.flatMap((edge) => [edge.source, ...edge.readers]));
  const anyPath = onPath.includes(true);
  const states = data.nodes.map((_, node) => {
    if (anyPath && between(node)) return "path";
    return drawn.has(node) ? "open" : "absent";
  });
  const focus = state.focus && state.focus.panel === panel.index ? state.focus.node : null;
  return { edges, onPath, linesOnPath, states, ...selectFocus(data, edges, focus) };
}

// The ancestors and descendants of the chosen node, and the edges on the way to and from it.
function selectFocus(data, edges, focus) {
  if (focus === null) return { focus, nearNode: () => true, nearEdge: () => true };
  const [before, after] = [reach(data, edges, focus, false), reach(data, edges, focus, true)];
  return {
    focus,
    nearNode: (node) => before.has(node) || after.has(node),
    nearEdge: (edge) => edge.readers.some((reader) => before.has(reader)) ||
      after.has(edge.source),
  };
}
