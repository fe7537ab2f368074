// Builds the legend, charts and tables, which share one set of hidden methods.
const data = JSON.parse(document.getElementById("data").textContent);
const methods = new Map(data.methods.map((method) => [method.spec, method]));
const hidden = new Set(), charts = [];
// A new kind of plot needs a renderer and an entry here.
const RENDERERS = { curves: drawCurves, bars: drawBars, dots: drawDots };

function toggle(parent, className, text, pressed, act) {
  const button = element(parent, "button", className, text);
  button.type = "button";
  button.setAttribute("aria-pressed", pressed);
  button.addEventListener("click", () => act(button));
  return button;
}

function buildLegend() {
  const legend = document.querySelector(".legend"), keys = [];
  const refresh = () => {
    for (const [spec, key] of keys) key.setAttribute("aria-pressed", !hidden.has(spec));
    all.hidden = hidden.size === 0;
    for (const row of document.querySelectorAll("tbody tr")) row.hidden = hidden.has(row.dataset.spec);
    for (const chart of charts) chart.draw();
  };
  for (const method of data.methods) {
    const key = toggle(legend, "key", "", true, () => {
      if (!hidden.delete(method.spec)) hidden.add(method.spec);
      refresh();
    });
    swatch(key, method);
    element(key, "span", "", method.spec);
    key.title = "Hide or show this method";
    keys.push([method.spec, key]);
  }
  const all = element(legend, "button", "all", "Show all");
  all.type = "button";
  all.hidden = true;
  all.addEventListener("click", () => { hidden.clear(); refresh(); });
}

function buildTools(figure, plot, state, draw) {
  const tools = figure.querySelector(".tools");
  const chip = (text, name) => toggle(tools, "chip", text, state[name], (button) => {
    state[name] = !state[name];
    button.setAttribute("aria-pressed", state[name]);
    draw();
  });
  if (plot.kind === "curves" || plot.kind === "dots") {
    chip(`log ${plot.x.name}`, "logX");
    chip(`log ${plot.y.name}`, "logY");
    if (plot.kind === "curves" && plot.traces.some((trace) => trace.x.length >= FEW)) chip("smooth", "smooth").title = "Bold: running mean. Faint: as measured.";
  }
  for (const [index, name] of (plot.names || []).entries()) {
    if (!plot.traces.some((bar) => bar.segments.some((part) => part.name === name))) continue;
    const key = element(tools, "span", "part");
    element(key, "i").style.background = `var(--p${index})`;
    key.append(name);
  }
}

function buildChart(figure) {
  const plot = data.plots[Number(figure.dataset.plot)], canvas = figure.querySelector(".canvas");
  const state = {};
  if (plot.kind === "dots") Object.assign(state, { logX: plot.x.log, logY: plot.y.log });
  if (plot.kind === "curves") {
    Object.assign(state, { logX: plot.x.log, logY: plot.y.log, smooth: plot.traces.some((trace) => trace.x.length >= FEW) });
  }
  let width = 0;
  const draw = () => {
    width = canvas.clientWidth;
    canvas.textContent = "";
    hideTip();
    RENDERERS[plot.kind](canvas, plot, state, methods, hidden);
  };
  buildTools(figure, plot, state, draw);
  draw();
  charts.push({ draw });
  // In the next frame: browsers report an error if a resize observer itself changes the layout.
  const adapt = () => { if (canvas.clientWidth !== width) draw(); };
  new ResizeObserver(() => requestAnimationFrame(adapt)).observe(canvas);
}

function sortKey(row, column) {
  const { key } = row.cells[column].dataset;
  return key === undefined ? null : Number.isNaN(Number(key)) ? key : Number(key);
}

// Cells without a value stay at the end in both directions.
function sortTable(table, column, sign) {
  const body = table.tBodies[0], rows = [...body.rows];
  const order = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
  rows.sort((one, two) => {
    const a = sortKey(one, column), b = sortKey(two, column);
    if (a === null || b === null) return (a === null) - (b === null);
    return sign * order(a, b);
  });
  body.append(...rows);
}

function buildTable(table) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const other of heads) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    sortTable(table, column, down ? -1 : 1);
  }));
  const known = [...table.tBodies[0].rows].filter((row) => row.dataset.spec !== undefined);
  for (const row of known) row.cells[0].prepend(swatch(row.cells[0], methods.get(row.dataset.spec)));
}

buildLegend();
document.querySelectorAll("table:not(.timeline):not(.overview)").forEach(buildTable);
// A folded chart has no width: it is built when its group is first opened.
for (const figure of document.querySelectorAll("figure")) {
  const fold = figure.closest("details.group");
  if (fold === null) buildChart(figure);
  else fold.addEventListener("toggle", () => buildChart(figure), { once: true });
}
function openTarget() {
  const target = document.getElementById(location.hash.slice(1));
  const fold = target && target.closest("details.group");
  if (!fold || fold.open) return;
  fold.open = true;
  target.scrollIntoView();
}
window.addEventListener("hashchange", openTarget);
openTarget();
