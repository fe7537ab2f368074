// Uses the report as a reader does, and writes what it saw where --dump-dom finds it.
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
// Shows that what is said on the console is heard.
console.error("the driver is done");
