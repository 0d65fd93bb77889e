// Layered graph drawing: order each row to reduce crossings, then compute positions. The method of
// Sugiyama, Tagawa and Toda, as in Graphviz's dot:
//
// 1. The caller assigns every vertex to a row. A line that skips rows has a bend, which is also a
//    vertex, in each row that it passes, so that every segment joins neighbouring rows.
// 2. Order: sweep up and down, sorting each row by the mean position of its neighbours in the row
//    sorted before; keep the order with the fewest crossings.
// 3. Positions: sweep up and down, moving each row to the least-squares positions
//    min sum_i w_i (x_i - d_i)^2 under x_{i+1} - x_i >= separation, where d_i is the weighted mean of
//    the neighbours' positions. After subtracting the separations this is isotonic regression, solved
//    exactly by pooling adjacent violators; bounds only clip the solution.
//
// Vertices are small integers; a segment is {lower, upper, weight, port}, with the weight of its
// preference for being vertical, and the offset of its upper end from the vertex, in pixels.

const ORDER_SWEEPS = 8, PLACE_SWEEPS = 10, FREE_WEIGHT = 0.1, PORT_SHARE = 0.01, END_SCALE = 2 ** 30;

function pullsOf(segments) {
  const below = [], above = [];
  for (const { lower, upper, weight, port } of segments) {
    (below[upper] ??= []).push([lower, -port, weight]);
    (above[lower] ??= []).push([upper, port, weight]);
  }
  return { below, above };
}

const NONE = [];

function orderRows(rows, segments) {
  const { below, above } = pullsOf(segments);
  const order = rows.map((row) => [...row]);
  const gaps = gapsOf(rows, segments);
  let best = order.map((row) => [...row]), fewest = countCrossings(order, gaps);
  for (let sweep = 0; sweep < ORDER_SWEEPS; sweep++) {
    const upwards = sweep % 2 === 0;
    for (let step = 1; step < order.length; step++) {
      const index = upwards ? step : order.length - 1 - step;
      const fixed = order[upwards ? index - 1 : index + 1];
      order[index] = sortedRow(order[index], fixed, upwards ? below : above);
    }
    const crossings = countCrossings(order, gaps);
    if (crossings < fewest) [best, fewest] = [order.map((row) => [...row]), crossings];
  }
  return best;
}

function sortedRow(row, fixed, pulls) {
  const place = [];
  fixed.forEach((vertex, index) => { place[vertex] = index; });
  const keyed = row.map((vertex, index) => {
    const found = pulls[vertex];
    let sum = 0;
    for (const [other, shift] of found ?? NONE) sum += place[other] + PORT_SHARE * shift;
    const key = found ? sum / found.length : ((index + 0.5) / row.length) * fixed.length;
    // Nearly equal means keep their order.
    return [Math.round(key * 1e6), vertex];
  });
  return keyed.sort((a, b) => a[0] - b[0]).map(([, vertex]) => vertex);
}

function gapsOf(rows, segments) {
  const height = [];
  rows.forEach((row, index) => row.forEach((vertex) => { height[vertex] = index; }));
  const gaps = rows.map(() => []);
  for (const segment of segments) gaps[height[segment.lower]].push(segment);
  return gaps;
}

// The number of pairs of segments that cross: inversions, counted in a Fenwick tree.
function countCrossings(rows, gaps) {
  const place = [];
  for (const row of rows) row.forEach((vertex, index) => { place[vertex] = index; });
  let total = 0;
  for (const gap of gaps) {
    // Both ends as one integer, so that the sort needs no comparison function.
    const n = gap.length, ends = new Float64Array(n);
    gap.forEach(({ lower, upper, port }, i) => {
      ends[i] = place[lower] * END_SCALE + Math.round(1e4 * (1 + place[upper] + PORT_SHARE * port));
    });
    const uppers = ends.sort().map((end) => end % END_SCALE);
    const values = uppers.slice().sort(), tree = new Int32Array(n + 1);
    for (let seen = 0; seen < n; seen++) {
      const upper = uppers[seen];
      let low = 0, high = n;
      while (low < high) {
        const middle = (low + high) >> 1;
        if (values[middle] <= upper) low = middle + 1;
        else high = middle;
      }
      for (let i = low; i > 0; i -= i & -i) total -= tree[i];
      for (let i = low; i <= n; i += i & -i) tree[i] += 1;
      total += seen;
    }
  }
  return total;
}

function placeRows(rows, segments, separations, ends) {
  const { below, above } = pullsOf(segments);
  const offsets = rows.map((row, r) => {
    const found = [0];
    for (const gap of separations[r]) found.push(found[found.length - 1] + gap);
    return found;
  });
  const x = [];
  rows.forEach((row, r) => row.forEach((vertex, i) => {
    x[vertex] = (ends[r][0] + ends[r][1] - offsets[r][offsets[r].length - 1]) / 2 + offsets[r][i];
  }));
  for (let sweep = 0; sweep < PLACE_SWEEPS; sweep++) {
    for (let step = 0; step < rows.length; step++) {
      const r = sweep % 2 === 0 ? step : rows.length - 1 - step;
      const [row, offset] = [rows[r], offsets[r]], targets = [], weights = [];
      row.forEach((vertex, i) => {
        let total = 0, wanted = 0;
        for (const map of [below, above]) {
          for (const [other, shift, weight] of map[vertex] ?? NONE) {
            total += weight;
            wanted += weight * (x[other] + shift);
          }
        }
        targets.push((total ? wanted / total : x[vertex]) - offset[i]);
        weights.push(total || FREE_WEIGHT);
      });
      let [low, high] = [ends[r][0], ends[r][1] - offset[offset.length - 1]];
      if (low > high) low = high = (low + high) / 2;
      const placed = isotonic(targets, weights);
      row.forEach((vertex, i) => {
        x[vertex] = Math.min(Math.max(placed[i], low), high) + offset[i];
      });
    }
  }
  return x;
}

// The non-decreasing sequence nearest to the targets in weighted least squares.
function isotonic(targets, weights) {
  const blocks = [];
  targets.forEach((target, i) => {
    let block = [target, weights[i], 1];
    while (blocks.length && blocks[blocks.length - 1][0] > block[0]) {
      const [mean, heavy, length] = blocks.pop();
      const total = heavy + block[1];
      block = [(mean * heavy + block[0] * block[1]) / total, total, length + block[2]];
    }
    blocks.push(block);
  });
  return blocks.flatMap(([mean, , length]) => Array(length).fill(mean));
}
