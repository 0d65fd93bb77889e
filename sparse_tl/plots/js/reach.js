// All nodes that can be reached from some along lines {source, reader}, upwards or downwards, including
// themselves.
function reach(lines, starts, upwards) {
  const [near, far] = upwards ? ["source", "reader"] : ["reader", "source"];
  const following = Map.groupBy(lines, (line) => line[near]), reached = new Set(starts);
  // Iterating a set includes elements added meanwhile.
  for (const node of reached) following.get(node)?.forEach((line) => reached.add(line[far]));
  return reached;
}
