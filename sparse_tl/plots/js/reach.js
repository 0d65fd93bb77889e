// All nodes that can be reached from one along lines {source, reader}, upwards or downwards, including
// itself.
function reach(lines, start, upwards) {
  const following = new Map();
  for (const { source, reader } of lines) {
    const [near, far] = upwards ? [source, reader] : [reader, source];
    if (!following.has(near)) following.set(near, []);
    following.get(near).push(far);
  }
  const reached = new Set([start]);
  // Iterating a set includes elements added meanwhile.
  for (const node of reached) following.get(node)?.forEach((next) => reached.add(next));
  return reached;
}
