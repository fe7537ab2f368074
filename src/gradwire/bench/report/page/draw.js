// SVG elements, the line style of a method, and the tooltip.
const SVG = document.querySelector("svg").namespaceURI;
const HUES = 6, DASHES = ["", "7 4", "2 4"];

function add(parent, name, attributes = {}, text = null) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  parent.append(node);
  return node;
}

function element(parent, name, className = "", text = "") {
  const node = document.createElement(name);
  node.className = className;
  node.textContent = text;
  parent.append(node);
  return node;
}

// Colour, dash and marker together distinguish methods, also without colour vision.
function methodStyle(method) {
  const { baseline, order } = method;
  if (baseline) return { colour: "var(--m0)", dash: "", shape: 0 };
  const cycle = Math.floor(order / HUES);
  return { colour: `var(--m${(order % HUES) + 1})`, dash: DASHES[cycle % DASHES.length], shape: (order + cycle + 1) % 4 };
}

function marker(parent, x, y, { colour, shape }, r = 4) {
  const paths = [
    `M${x - r},${y}a${r},${r} 0 1 0 ${2 * r},0a${r},${r} 0 1 0 ${-2 * r},0Z`,
    `M${x - r},${y - r}h${2 * r}v${2 * r}h${-2 * r}Z`,
    `M${x},${y - 1.25 * r}l${1.2 * r},${2.1 * r}h${-2.4 * r}Z`,
    `M${x},${y - 1.35 * r}l${1.35 * r},${1.35 * r}l${-1.35 * r},${1.35 * r}l${-1.35 * r},${-1.35 * r}Z`,
  ];
  return add(parent, "path", { d: paths[shape], fill: colour, class: "marker" });
}

function swatch(parent, method) {
  const svg = add(parent, "svg", { width: 26, height: 14, viewBox: "0 0 26 14", "aria-hidden": "true" });
  const style = methodStyle(method);
  add(svg, "path", { d: "M1,7H25", stroke: style.colour, "stroke-width": 2.2, "stroke-dasharray": style.dash, fill: "none" });
  marker(svg, 13, 7, style);
  return svg;
}

const tip = document.querySelector(".tip");

function showTip(event, name, pairs) {
  tip.textContent = "";
  element(tip, "b", "", name);
  for (const [key, value] of pairs) {
    const line = element(tip, "span");
    element(line, "em", "", key).style.fontStyle = "normal";
    element(line, "strong", "", value).style.fontWeight = "600";
  }
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect(), edge = 8, away = 16;
  const right = event.clientX + away + width < innerWidth - edge;
  const left = right ? event.clientX + away : event.clientX - away - width;
  tip.style.left = `${Math.max(edge, left)}px`;
  tip.style.top = `${Math.max(edge, Math.min(event.clientY - height / 2, innerHeight - height - edge))}px`;
}

function hideTip() { tip.hidden = true; }
