// Plots of the kind "curves": lines on linear or logarithmic axes.
const FEW = 60, LABEL_PX = 6.9;

function smoothed(values) {
  const most = Math.max(1, Math.round(values.length / 40));
  return values.map((_, i) => {
    // The window is symmetric, also at the ends: an asymmetric mean would be biased there.
    const half = Math.min(most, i, values.length - 1 - i);
    const near = values.slice(Math.max(0, i - half), i + half + 1);
    return near.reduce((sum, value) => sum + value, 0) / near.length;
  });
}

function curvePoints(trace, state) {
  const ys = state.smooth ? smoothed(trace.y) : trace.y;
  return trace.x
    .map((x, i) => ({ x, y: ys[i], raw: trace.y[i], step: trace.step[i] }))
    .filter((p) => (!state.logX || p.x > 0) && (!state.logY || (p.y > 0 && p.raw > 0)));
}

// A diverging curve may leave the chart at the top, so that it does not flatten the others.
function yRange(curves, levels, log, rises) {
  const ys = curves.flatMap(({ points }) => points.map((p) => p.y));
  const start = Math.max(...curves.map(({ points }) => points[0].y));
  const high = Math.min(Math.max(...ys), rises ? Infinity : 1.5 * start), low = Math.min(...ys, ...levels.map((level) => level.y));
  if (log) return [low / 1.12, high * 1.12];
  const pad = (high - low || Math.abs(high) || 1) * 0.06;
  return [low >= 0 ? Math.max(0, low - pad) : low - pad, high + pad];
}

function xRange(curves, log) {
  const xs = curves.flatMap(({ points }) => points.map((p) => p.x));
  const low = log ? Math.min(...xs) : 0, high = Math.max(...xs);
  if (high > low) return [low, high];
  return log ? [low / 2, low * 2] : [0, high || 1];
}

function drawCurves(canvas, plot, state, methods, hidden) {
  const width = canvas.clientWidth, height = Math.round(Math.min(340, Math.max(260, width * 0.62)));
  const svg = add(canvas, "svg", { width, height, role: "img", "aria-label": `${plot.title}. ${plot.caption}` });
  const curves = plot.traces
    .filter((trace) => !hidden.has(trace.spec))
    .map((trace) => ({ trace, points: curvePoints(trace, state), style: methodStyle(methods.get(trace.spec)) }))
    .filter(({ points }) => points.length > 0);
  if (curves.length === 0) {
    add(svg, "text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "Nothing to show here.");
    return;
  }
  const levels = plot.levels.filter((level) => !state.logY || level.y > 0);
  const frame = drawAxes(svg, plot, state, curves, levels, width, height);
  const inside = clipped(svg, frame);
  for (const curve of curves) drawCurve(inside, curve, state, frame);
  drawLevels(svg, levels, curves, frame);
  drawMarks(svg, plot.marks.filter((mark) => !state.logX || mark.x > 0), frame);
  hoverCurves(svg, plot, curves, frame);
}

function drawAxes(svg, plot, state, curves, levels, width, height, range = yRange(curves, levels, state.logY, plot.y.rises)) {
  const top = 24, bottom = height - 42, right = width - 10;
  const yOf = state.logY ? logScale : linearScale, xOf = state.logX ? logScale : linearScale;
  const y = yOf(...range, bottom, top, plot.y, 5);
  const left = 12 + LABEL_PX * Math.max(...y.ticks.map((tick) => tick.text.length));
  const x = xOf(...xRange(curves, state.logX), left, right, plot.x, Math.max(3, Math.floor(width / 85)));
  for (const tick of y.ticks) {
    add(svg, "path", { d: `M${left},${y.at(tick.value)}H${right}`, class: "gridline" });
    add(svg, "text", { x: left - 8, y: y.at(tick.value) + 4, "text-anchor": "end" }, tick.text);
  }
  add(svg, "path", { d: `M${left},${bottom}H${right}`, class: "axis" });
  drawXTicks(svg, x, bottom, right);
  add(svg, "text", { x: 0, y: 11 }, y.title);
  add(svg, "text", { x: right, y: height - 5, "text-anchor": "end" }, x.title);
  return { x, y, left, right, top, bottom };
}

// A tick whose label would overlap the previous one or the edge is drawn without its label.
function drawXTicks(svg, x, bottom, right) {
  let free = -Infinity;
  for (const tick of x.ticks) {
    const at = x.at(tick.value), half = (LABEL_PX * tick.text.length) / 2;
    add(svg, "path", { d: `M${at},${bottom}v5`, class: "axis" });
    const centre = Math.min(at, right + 8 - half);
    if (centre - half < free) continue;
    add(svg, "text", { x: centre, y: bottom + 18, "text-anchor": "middle" }, tick.text);
    free = centre + half + 6;
  }
}

function drawLevels(svg, levels, curves, { x, y, left, right }) {
  for (const level of levels) {
    const at = y.at(level.y), wide = LABEL_PX * level.label.length + 8;
    // The label is at the end of the line that fewer curves cross.
    const crossings = (from) => curves.flatMap(({ points }) => points).filter((p) => {
      const px = x.at(p.x), py = y.at(p.y);
      return px > from && px < from + wide && py > at - 22 && py < at + 4;
    }).length;
    const start = crossings(left) < crossings(right - wide);
    add(svg, "path", { d: `M${left},${at}H${right}`, class: "level" });
    add(svg, "text", { x: start ? left + 5 : right, y: at - 6, "text-anchor": start ? "start" : "end", class: "halo" }, level.label);
  }
}

// Labels are above the chart, beside the title of the y axis; a label that does not fit is left out.
function drawMarks(svg, marks, { x, y, left, bottom }) {
  let free = LABEL_PX * y.title.length + 14;
  for (const mark of marks) {
    const at = x.at(mark.x), first = at <= left, from = first ? Math.max(free, at) : at + 5;
    if (!first) add(svg, "path", { d: `M${at},2V${bottom}`, class: "level" });
    if (from < free) continue;
    add(svg, "text", { x: from, y: 11, class: "mark" }, mark.label);
    free = from + LABEL_PX * mark.label.length + 8;
  }
}

let clips = 0;

function clipped(svg, { left, right, top, bottom }) {
  const id = `clip${clips++}`, clip = add(svg, "clipPath", { id });
  add(clip, "rect", { x: left - 5, y: top - 5, width: right - left + 10, height: bottom - top + 6 });
  return add(svg, "g", { "clip-path": `url(#${id})` });
}

function drawCurve(parent, curve, state, { x, y }) {
  const path = (value) => curve.points.map((p, i) => `${i ? "L" : "M"}${x.at(p.x).toFixed(1)},${y.at(value(p)).toFixed(1)}`).join("");
  const { colour, dash } = curve.style;
  curve.nodes = [];
  if (state.smooth) curve.nodes.push(add(parent, "path", { d: path((p) => p.raw), stroke: colour, class: "raw" }));
  curve.nodes.push(add(parent, "path", { d: path((p) => p.y), stroke: colour, "stroke-dasharray": dash, class: "curve" }));
  const last = curve.points[curve.points.length - 1];
  curve.nodes.push(marker(parent, x.at(last.x), y.at(last.y), curve.style));
}

function nearest(event, svg, curves, { x, y }) {
  const box = svg.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
  let best = { distance: Infinity };
  for (const curve of curves) {
    for (const p of curve.points) {
      const distance = Math.hypot(x.at(p.x) - px, y.at(p.y) - py);
      if (distance < best.distance) best = { distance, curve, p };
    }
  }
  return best;
}

function hoverCurves(svg, plot, curves, frame) {
  const dot = add(svg, "circle", { r: 4.5, stroke: "var(--panel)", "stroke-width": 2, visibility: "hidden" });
  const fade = (selected) => {
    for (const curve of curves) for (const node of curve.nodes) node.classList.toggle("faded", selected !== null && curve !== selected);
  };
  const leave = () => { fade(null); dot.setAttribute("visibility", "hidden"); hideTip(); };
  const move = (event) => {
    const { distance, curve, p } = nearest(event, svg, curves, frame);
    if (distance > 60) return leave();
    fade(curve);
    for (const [key, value] of [["cx", frame.x.at(p.x)], ["cy", frame.y.at(p.y)], ["fill", curve.style.colour], ["visibility", "visible"]]) dot.setAttribute(key, value);
    const pairs = [[plot.y.label, quantity(p.raw, plot.y.unit)]];
    // If x is the step or the number of workers, it is shown once, as an integer.
    if (p.x === p.step) pairs.unshift([plot.x.label, p.step.toLocaleString("en")]);
    else pairs.unshift([plot.x.label, quantity(p.x, plot.x.unit)], ["step", p.step.toLocaleString("en")]);
    return showTip(event, curve.trace.label, pairs);
  };
  svg.addEventListener("pointermove", move);
  svg.addEventListener("pointerdown", move);
  svg.addEventListener("pointerleave", leave);
}
