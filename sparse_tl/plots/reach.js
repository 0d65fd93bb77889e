// All nodes that can be reached from one over lines {source, reader}, upwards or downwards, itself
// included.
function reach(lines, start, upwards) {
  const following = new Map();
  for (const { source, reader } of lines) {
    const [near, far] = upwards ? [source, reader] : [reader, source];
    if (!following.has(near)) following.set(near, []);
    following.get(near).push(far);
  }
  const reached = new Set([start]);
  // A set that grows is walked to its new end.
  for (const node of reached) following.get(node)?.forEach((next) => reached.add(next));
  return reached;
}
