// Formats numbers for readers, like human.py.
const BYTE_UNITS = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]];
const TIME_UNITS = [[3600, "h"], [60, "min"], [1, "s"], [1e-3, "ms"]];

function digits(value) {
  if (value === 0) return "0";
  const places = 2 - Math.floor(Math.log10(Math.abs(Number(value.toPrecision(3)))));
  return value.toLocaleString("en", {
    minimumFractionDigits: Math.min(6, Math.max(0, places)),
    maximumFractionDigits: Math.min(6, Math.max(0, places)),
  });
}

function bytes(value) {
  const [size, unit] = BYTE_UNITS.find(([size]) => value >= 0.9995 * size) || [1, "B"];
  return size === 1 ? `${Math.round(value)} B` : `${digits(value / size)} ${unit}`;
}

function seconds(value) {
  if (value === 0) return "0 s";
  if (value < 0.9995) return `${digits(value * 1e3)} ms`;
  if (value < 119.5) return `${digits(value)} s`;
  const whole = Math.round(value), minutes = Math.floor(whole / 60);
  const two = (number) => String(number).padStart(2, "0");
  if (minutes < 60) return `${minutes} min ${two(whole % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${two(minutes % 60)} min`;
}

function quantity(value, unit) {
  if (unit === "B") return bytes(value);
  if (unit === "s") return seconds(value);
  if (unit === "ms") return seconds(value / 1e3);
  return digits(value);
}

// Returns the unit of an axis that ends at `most`: [its size in the axis's own unit, its name].
function axisUnit(most, unit) {
  if (unit === "B") return BYTE_UNITS.find(([size]) => most >= size) || [1, "B"];
  if (unit === "ms") return most >= 1e4 ? [1e3, "s"] : [1, "ms"];
  if (unit !== "s") return [1, ""];
  return TIME_UNITS.find(([size]) => most >= (size === 1 ? 1 : 3 * size)) || [1e-3, "ms"];
}
