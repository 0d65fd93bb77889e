// All nodes that can be reached from some along lines {source, reader}, upwards or downwards, including
// themselves.
function reach(lines, starts, upwards) {
  const following = new Map();
  for (const { source, reader } of lines) {
    const [near, far] = upwards ? [source, reader] : [reader, source];
    if (!following.has(near)) following.set(near, []);
    following.get(near).push(far);
  }
  const reached = new Set(starts);
  // Iterating a set includes elements added meanwhile.
  for (const node of reached) following.get(node)?.forEach((next) => reached.add(next));
  return reached;
}
