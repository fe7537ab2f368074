// Maps values to pixels, with ticks at round numbers.
function niceStep(span, count) {
  const rough = span / count, power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((step) => step * power >= rough * 0.999);
}

function linearTicks(low, high, count) {
  const step = niceStep(high - low, count), ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step || 0);
  return { ticks, places: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) };
}

function logTicks(low, high, count) {
  const decades = Math.log10(high / low), ticks = [];
  const steps = decades < 1 ? [1, 2, 3, 5, 7] : decades <= count / 2.5 ? [1, 2, 5] : [1];
  const every = Math.max(1, Math.ceil(decades / count));
  for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++) {
    if (e % every !== 0) continue;
    for (const step of steps) {
      const tick = step * 10 ** e;
      if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
    }
  }
  return ticks;
}

// Returns a short label for one tick of a logarithmic axis: 10 kB, 0.5, 2 min.
function logLabel(tick, unit) {
  const [size, name] = axisUnit(tick * 1.001, unit);
  return `${Number((tick / size).toPrecision(2)).toLocaleString("en", { maximumFractionDigits: 6 })}${name && ` ${name}`}`;
}

function linearScale(low, high, from, to, axis, count) {
  const [size, name] = axisUnit(high, axis.unit);
  const { ticks, places } = linearTicks(low / size, high / size, count);
  const format = { minimumFractionDigits: places, maximumFractionDigits: places };
  return {
    at: (value) => from + ((value - low) / (high - low)) * (to - from),
    ticks: ticks.map((tick) => ({ value: tick * size, text: tick.toLocaleString("en", format) })),
    title: name ? `${axis.label} (${name})` : axis.label,
  };
}

function logScale(low, high, from, to, axis, count) {
  const width = Math.log(high / low);
  return {
    at: (value) => from + (Math.log(value / low) / width) * (to - from),
    ticks: logTicks(low, high, count).map((value) => ({ value, text: logLabel(value, axis.unit) })),
    title: axis.label,
  };
}
