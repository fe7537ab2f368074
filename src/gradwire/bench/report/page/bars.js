// Plots of the kind "bars": one row per method, with the name above the bar so that long names fit.
const ROW = 46, BAR = 15, VALUE_PX = 7.4, NAME_PX = 7.6;

function drawBars(canvas, plot, state, methods, hidden) {
  const bars = plot.traces.filter((bar) => !hidden.has(bar.spec));
  const width = canvas.clientWidth, bottom = 6 + ROW * Math.max(1, bars.length);
  const svg = add(canvas, "svg", { width, height: bottom + 44, role: "img", "aria-label": `${plot.title}. ${plot.caption}` });
  if (bars.length === 0) {
    add(svg, "text", { x: width / 2, y: 40, "text-anchor": "middle" }, "Nothing to show here.");
    return;
  }
  const texts = bars.map((bar) => [quantity(bar.total, plot.x.unit), bar.note]);
  const valueWidth = 16 + VALUE_PX * Math.max(...texts.map(([value, note]) => value.length + (note ? note.length + 2 : 0)));
  const longest = Math.max(...bars.map((bar) => Math.max(bar.high || 0, bar.total, partsSum(bar))));
  const most = Math.min(longest, plot.cut || Infinity);
  const x = linearScale(0, most || 1, 1, width - valueWidth, plot.x, Math.max(2, Math.floor(width / 110)));
  for (const tick of x.ticks) {
    add(svg, "path", { d: `M${x.at(tick.value)},4V${bottom + 4}`, class: "gridline" });
    add(svg, "text", { x: Math.max(x.at(tick.value), 4), y: bottom + 20, "text-anchor": "middle" }, tick.text);
  }
  add(svg, "text", { x: width, y: bottom + 39, "text-anchor": "end" }, x.title);
  bars.forEach((bar, row) => drawBar(svg, plot, bar, texts[row], 6 + row * ROW, x, methods, width));
}

function partsSum(bar) { return bar.segments.reduce((sum, part) => sum + part.value, 0); }

function drawBar(svg, plot, bar, [value, note], top, x, methods, width) {
  const row = add(svg, "g"), y = top + 20, style = methodStyle(methods.get(bar.spec));
  add(row, "rect", { x: 0, y: top, width, height: ROW, fill: "transparent" });
  add(row, "text", { x: 1, y: top + 13, class: "name halo" }, shortened(bar.label, Math.floor(width / NAME_PX)));
  let start = 0;
  const most = plot.cut || Infinity;
  for (const part of bar.segments) {
    const from = x.at(start), to = x.at(Math.min(most, start + part.value)), index = plot.names.indexOf(part.name);
    const fill = index < 0 ? style.colour : `var(--p${index})`;
    if (to - from > 0) add(row, "rect", { x: from, y, width: Math.max(1, to - from - (index < 0 ? 0 : 1)), height: BAR, rx: 2, fill });
    start += part.value;
  }
  drawSpread(row, bar, y, x);
  if (bar.total > most) drawCut(row, x.at(most), y);
  const end = x.at(Math.min(most, Math.max(start, bar.high || 0, bar.total))) + 9;
  const text = add(row, "text", { x: end, y: y + 12, class: "value" }, value);
  if (note) add(text, "tspan", { dx: 8, style: "font-weight:400;fill:var(--muted)" }, note);
  hoverBar(row, plot, bar);
}

// Replaces the middle of a name that is longer than `most` by an ellipsis; the tooltip shows all of it.
function shortened(name, most) {
  if (name.length <= most) return name;
  const half = Math.floor((most - 1) / 2);
  return `${name.slice(0, most - 1 - half)}…${name.slice(-half)}`;
}

// Two slanted gaps near the end mark a bar that is cut off.
function drawCut(row, end, y) {
  for (const at of [end - 22, end - 15]) {
    add(row, "path", { d: `M${at},${y + BAR + 2}l5,${-BAR - 4}`, stroke: "var(--panel)", "stroke-width": 3 });
  }
}

function drawSpread(row, bar, y, x) {
  const middle = y + BAR / 2, at = x.at(bar.total);
  if (bar.low !== null && bar.high !== null) {
    const low = x.at(bar.low), high = x.at(bar.high);
    add(row, "path", { d: `M${low},${middle}H${high}M${low},${middle - 4}v8M${high},${middle - 4}v8`, class: "whisker" });
  }
  if (partsSum(bar) > bar.total * 1.001) add(row, "path", { d: `M${at},${y - 3}v${BAR + 6}`, class: "whisker" });
}

function hoverBar(row, plot, bar) {
  const unit = plot.x.unit, parts = plot.names.length ? bar.segments : [];
  const pairs = [[plot.x.label, quantity(bar.total, unit)], ...parts.map((part) => [part.name, quantity(part.value, unit)])];
  if (bar.low !== null && bar.high !== null) pairs.push(["20–80 %", `${quantity(bar.low, unit)} – ${quantity(bar.high, unit)}`]);
  const show = (event) => showTip(event, bar.label, pairs);
  row.addEventListener("pointermove", show);
  row.addEventListener("pointerdown", show);
  row.addEventListener("pointerleave", hideTip);
}
