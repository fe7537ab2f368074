// Operates the report like a reader, and writes the results for --dump-dom.
const facts = {};
const rows = () => [...document.querySelectorAll("#s0 tbody tr")].filter((row) => !row.hidden);
const texts = (column) => rows().map((row) => row.cells[column].textContent);
const count = (selector) => document.querySelectorAll(`#s0 ${selector}`).length;
const shown = () => ({ rows: rows().length, dots: count(".dot"), curves: count(".curve") });
const head = document.querySelectorAll("#s0 th button")[1];
const key = [...document.querySelectorAll(".key")].find((node) => node.textContent === "sign");

facts.before = shown();
head.click();
facts.up = texts(1);
head.click();
facts.down = texts(1);
key.click();
facts.filtered = { ...shown(), pressed: key.getAttribute("aria-pressed") };
document.querySelector(".all").click();
facts.after = shown();
for (const chip of document.querySelectorAll(".chip")) chip.click();
facts.fits = document.documentElement.scrollWidth <= innerWidth;

const out = document.createElement("output");
out.id = "facts";
out.textContent = JSON.stringify(facts);
document.body.append(out);
// Shows that the test reads the console.
console.error("the driver is done");
