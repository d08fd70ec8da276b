"use strict";
(() => {
  // Charts: drawn once they are about to be seen, which those in closed details are not.
  const element = document.getElementById("charts");
  const specs = element ? JSON.parse(element.textContent) : {};
  const watcher = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting) continue;
      watcher.unobserve(target);
      const spec = specs[target.dataset.chart];
      spec.config.legend.columns = Math.max(2, Math.floor(target.clientWidth / 130));
      vegaEmbed(target, spec, { actions: false, renderer: "svg" });
    }
  }, { rootMargin: "600px" });
  document.querySelectorAll("[data-chart]").forEach((figure) => watcher.observe(figure));

  // Tables: a click on a head sorts, numbers as numbers, cells without one last.
  const number = (text) => parseFloat(text.replace(/,/g, "").replace("−", "-"));
  for (const table of document.querySelectorAll(".table")) {
    const body = table.querySelector("tbody");
    const heads = [...table.querySelectorAll("thead th")];
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      const isNumber = head.classList.contains("number");
      const key = (row) => row.cells[column].textContent;
      const compare = (one, other) => {
        if (!isNumber) return sign * key(one).localeCompare(key(other), undefined, { numeric: true });
        const [a, b] = [number(key(one)), number(key(other))];
        return isNaN(a) || isNaN(b) ? isNaN(a) - isNaN(b) : sign * (a - b);
      };
      body.append(...[...body.rows].sort(compare));
    }));

    const field = table.querySelector("input");
    field?.addEventListener("input", () => {
      const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const row of body.rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
      }
    });

    const fold = table.querySelector(".fold");
    if (!fold) continue;
    const count = fold.textContent;
    const show = (isShown) => {
      table.classList.toggle("folded", !isShown);
      fold.setAttribute("aria-expanded", isShown);
      fold.textContent = (isShown ? "hide " : "show ") + count;
    };
    fold.addEventListener("click", () => show(table.classList.contains("folded")));
    show(false);
  }
})();
