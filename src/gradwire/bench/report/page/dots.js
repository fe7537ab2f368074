// Plots of the kind "dots": one dot per method, and a line through the Pareto front.
function drawDots(canvas, plot, state, methods, hidden) {
  const width = canvas.clientWidth, height = Math.round(Math.min(340, Math.max(260, width * 0.62)));
  const svg = add(canvas, "svg", { width, height, role: "img", "aria-label": `${plot.title}. ${plot.caption}` });
  const dots = plot.traces.filter((dot) => !hidden.has(dot.spec) && (!state.logX || dot.x > 0) && (!state.logY || dot.low > 0));
  if (dots.length === 0) {
    add(svg, "text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "Nothing to show here.");
    return;
  }
  // The axes are scaled to a curve through the ends of all ranges, with a margin.
  const ends = dots.flatMap((dot) => [{ x: dot.x / 1.2, y: dot.low }, { x: dot.x * 1.2, y: dot.high }]);
  const frame = drawAxes(svg, plot, state, [{ points: ends }], [], width, height, dotsRange(ends, state.logY));
  const at = ({ x, y }) => [frame.x.at(x), frame.y.at(y)];
  const best = dots.filter((dot) => dot.best);
  add(svg, "path", { d: best.map((dot, i) => `${i ? "L" : "M"}${at(dot).map((px) => px.toFixed(1))}`).join(""), class: "frontier" });
  const taken = dots.map((dot) => box(...at(dot), 12));
  // The best are labelled first; a label that does not fit is left out, and the tooltip has the name.
  for (const dot of [...best, ...dots.filter((other) => !other.best)]) drawDot(svg, plot, dot, at(dot), methods, frame, taken);
}

function dotsRange(ends, log) {
  const low = Math.min(...ends.map((end) => end.y)), high = Math.max(...ends.map((end) => end.y));
  if (log) return [low / 1.05, high * 1.05];
  const pad = (high - low || Math.abs(high) || 1) * 0.12;
  return [low - pad, high + pad];
}

function box(x, y, size) { return { left: x - size / 2, right: x + size / 2, top: y - size / 2, bottom: y + size / 2 }; }

function nameDot(group, dot, px, py, frame, taken) {
  const wide = LABEL_PX * dot.spec.length;
  const offsets = [[9, -4], [9, 12], [-9 - wide, -4], [-9 - wide, 12], [-wide / 2, -12], [-wide / 2, 22]];
  for (const [dx, dy] of offsets) {
    const label = { left: px + dx, right: px + dx + wide, top: py + dy - 10, bottom: py + dy + 3 };
    const outside = label.left < frame.left || label.right > frame.right + 10 || label.top < 12 || label.bottom > frame.bottom;
    const overlaps = taken.some((other) => label.left < other.right && label.right > other.left && label.top < other.bottom && label.bottom > other.top);
    if (outside || overlaps) continue;
    taken.push(label);
    add(group, "text", { x: label.left, y: py + dy, class: "halo" }, dot.spec);
    return;
  }
}

function drawDot(svg, plot, dot, [px, py], methods, frame, taken) {
  const group = add(svg, "g", { class: dot.best ? "dot best" : "dot" }), style = methodStyle(methods.get(dot.spec));
  if (dot.high > dot.low) add(group, "path", { d: `M${px},${frame.y.at(dot.low)}V${frame.y.at(dot.high)}`, stroke: style.colour, class: "range" });
  marker(group, px, py, style, 5.5);
  nameDot(group, dot, px, py, frame, taken);
  const pairs = [[plot.x.label, quantity(dot.x, plot.x.unit)], [plot.y.label, digits(dot.y)]];
  if (dot.high > dot.low) pairs.push(["over seeds", `${digits(dot.low)} – ${digits(dot.high)}`]);
  const show = (event) => showTip(event, dot.spec, pairs);
  group.addEventListener("pointermove", show);
  group.addEventListener("pointerdown", show);
  group.addEventListener("pointerleave", hideTip);
}
