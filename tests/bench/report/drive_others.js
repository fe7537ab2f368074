// Operates the sections that are not about runs, and writes the results for --dump-dom.
const facts = {};
// As if a reader opened every group, whose charts are built then.
for (const fold of document.querySelectorAll("details")) {
  fold.open = true;
  fold.dispatchEvent(new Event("toggle"));
}
const part = (words) => [...document.querySelectorAll("section")].find((node) => node.querySelector("h2").textContent.startsWith(words));
const links = part("Changing links"), levels = part("Two levels");
const shown = () => ({
  curves: links.querySelectorAll(".curve").length,
  rows: [...links.querySelectorAll("table:not(.timeline) tbody tr")].filter((row) => !row.hidden).length,
});
const head = levels.querySelectorAll("th button")[4];
const ratios = () => [...levels.querySelectorAll("tbody tr")].map((row) => row.cells[4].textContent);

facts.marks = [...links.querySelectorAll(".mark")].map((node) => node.textContent);
facts.before = shown();
[...document.querySelectorAll(".key")].find((node) => node.textContent === "none").click();
facts.after = shown();
facts.colours = ["Two levels", "Cost of guards", "Fuzzed", "Jobs", "Faults"].flatMap((words) => [...part(words).querySelectorAll("svg")]).length;
head.click();
facts.up = ratios();
head.click();
facts.down = ratios();
facts.fits = document.documentElement.scrollWidth <= innerWidth;
facts.legend = document.querySelector(".legend").clientHeight < innerHeight / 4;

const out = document.createElement("output");
out.id = "facts";
out.textContent = JSON.stringify(facts);
document.body.append(out);
// Shows that the test reads the console.
console.error("the driver is done");
