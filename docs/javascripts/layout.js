// Replaces what matches a pattern in texts below the elements of a selector.
function replaceTexts(selector, pattern, replacement) {
  for (const element of document.querySelectorAll(selector)) {
    const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT), texts = [];
    while (walker.nextNode()) texts.push(walker.currentNode);
    for (const text of texts)
      text.replaceWith(...text.data.split(pattern).map((part, index) => index % 2 ? replacement(part) : part));
  }
}

// Options such as --bits are not broken at their hyphens, but names of rows after underscores in small tables.
replaceTexts(".md-typeset code", /(\S*-\S{1,30})/, (option) =>
  Object.assign(document.createElement("span"), { className: "unbroken", textContent: option }));
replaceTexts(".md-typeset td:first-child", /(?<=_)()/, () => document.createElement("wbr"));

// Tables that do not fit get smaller text, then become cards: on phones, those of more than two columns always do.
// A card has the name of the row, then its verdict and qualities, then the other columns.
const FIRST = [/verdict|works|result/i, /^here|worst|perplexity|bleu|rouge|kept|quality|measured|costs|small there/i];
const tables = [...document.querySelectorAll(".md-typeset table:not([class])")];

for (const table of tables) {
  const names = [...table.querySelectorAll("thead th")].map((head) => head.textContent.trim());
  for (const row of table.querySelectorAll("tbody tr"))
    [...row.cells].forEach((cell, column) => {
      const rank = FIRST.findIndex((name) => name.test(names[column]));
      cell.dataset.name = names[column] ?? "";
      cell.style.order = column === 0 ? 0 : 1 + (rank < 0 ? FIRST.length : rank);
      cell.toggleAttribute("data-empty", ["", "–"].includes(cell.textContent.trim()));
    });
}

function fit() {
  const phone = matchMedia("(max-width: 44.98em)").matches;
  for (const layout of ["", "small", "cards"]) {
    const wide = tables.filter((table) =>
      layout === "" || table.offsetWidth > table.parentElement.clientWidth
      || (layout === "cards" && phone && table.rows[0].cells.length > 2));
    wide.forEach((table) => { table.dataset.layout = layout; });
  }
}

fit();
addEventListener("resize", fit);
