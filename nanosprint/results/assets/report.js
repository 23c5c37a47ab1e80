
"use strict";

// Light and dark: the system's choice until the button is pressed, then what was chosen, kept where the browser allows.
(() => {
  const root = document.documentElement, button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  const show = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-pressed", String(isDark()));
    button.setAttribute("aria-label", "Switch to the " + button.textContent.toLowerCase() + " look");
  };
  try { const kept = localStorage.getItem("nanosprint-theme"); if (kept) root.dataset.theme = kept; } catch { /* none */ }
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("nanosprint-theme", root.dataset.theme); } catch { /* not kept */ }
    show();
  });
  system.addEventListener("change", show);
  show();
})();

// Sorting: a click on a head sorts by it, another turns the order round; what is not known comes last either way.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => head.firstElementChild.addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") !== "ascending", isNumber = head.classList.contains("num");
    heads.forEach((other) => other.setAttribute("aria-sort", "none"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const value = (row) => row.cells[column].dataset.v;
    const compare = (a, b) => (isNumber ? a - b : a.localeCompare(b));
    const rows = [...body.rows].sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === "" || y === "") return (x === "") - (y === "");
      return up ? compare(x, y) : compare(y, x);
    });
    body.append(...rows);
  }));
}

// A link to an entry opens it.
const openEntry = () => {
  const entry = location.hash && document.getElementById(location.hash.slice(1));
  if (entry && entry.tagName === "DETAILS") { entry.open = true; entry.scrollIntoView(); }
};
addEventListener("hashchange", openEntry);
openEntry();

// Charts stretch with the page; their text keeps the size of small print.
const sizes = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) {
    const units = target.firstElementChild.viewBox.baseVal.width / contentRect.width;
    target.style.setProperty("--print", 11 * Math.max(0.55, Math.min(1.45, units)) + "px");
  }
});
document.querySelectorAll(".chart").forEach((chart) => sizes.observe(chart));

// Values under the pointer, or under the arrow keys: every line's point nearest in x.
const CHARTS = JSON.parse(document.getElementById("charts").textContent);
const element = (name, text) => {
  const made = document.createElement(name[0] === "." ? "div" : name);
  if (name[0] === ".") made.className = name.slice(1);
  if (text !== undefined) made.textContent = text;
  return made;
};
const nearest = (xs, x) => {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) { const mid = (low + high) >> 1; if (xs[mid] < x) low = mid; else high = mid; }
  return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
};
const short = (x) => (Math.abs(x) >= 1000 ? Math.round(x).toLocaleString("en") : String(+x.toPrecision(4)));

for (const chart of document.querySelectorAll(".chart.hover")) {
  const { size, box, x: [x0, x1], y: [y0, y1], label, series } = CHARTS[chart.dataset.chart];
  const [left, top, width, height] = box;
  let drawn = [], at = null;
  const clear = () => { drawn.forEach((part) => part.remove()); drawn = []; };
  const add = (part) => { chart.append(part); drawn.push(part); return part; };

  const show = (x) => {
    clear();
    at = x;
    const scale = chart.clientWidth / size[0];
    const px = (v) => scale * (left + (width * (v - x0)) / (x1 - x0));
    const py = (v) => scale * (top + (height * (y1 - v)) / (y1 - y0));
    const points = series.map((line) => ({ line, i: nearest(line.x, x) }));
    const anchor = points.reduce((a, b) => (Math.abs(b.line.x[b.i] - x) < Math.abs(a.line.x[a.i] - x) ? b : a));
    const anchorX = anchor.line.x[anchor.i];
    const cursor = add(element(".cursor"));
    Object.assign(cursor.style, { left: px(anchorX) + "px", top: scale * top + "px", height: scale * height + "px" });
    const tip = add(element(".tip"));
    tip.append(element("small", short(anchorX) + " " + label));
    for (const { line, i } of points) {
      const row = element("div"), chip = element("i");
      chip.style.background = "var(--s" + line.color + ")";
      row.append(chip, line.name + " ", element("b", line.y[i].toFixed(4)));
      const extra = [];
      if (line.low) extra.push(line.low[i].toFixed(4) + " – " + line.high[i].toFixed(4));
      if (line.x[i] !== anchorX) extra.push("at " + short(line.x[i]));
      if (extra.length) row.append(element("small", " " + extra.join(", ")));
      tip.append(row);
      if (line.y[i] >= y0 && line.y[i] <= y1) {
        const dot = add(element(".dot"));
        Object.assign(dot.style, { left: px(line.x[i]) + "px", top: py(line.y[i]) + "px", background: chip.style.background });
      }
    }
    const place = px(anchorX) + 14;
    tip.style.top = scale * top + 4 + "px";
    const room = chart.clientWidth - tip.offsetWidth;
    tip.style.left = Math.max(0, place <= room ? place : Math.min(room, px(anchorX) - 14 - tip.offsetWidth)) + "px";
  };
  const valueAt = (event) => {
    const scale = chart.clientWidth / size[0], offset = event.clientX - chart.getBoundingClientRect().left;
    return x0 + ((offset / scale - left) / width) * (x1 - x0);
  };

  const all = [...new Set(series.flatMap((line) => line.x))].sort((a, b) => a - b);
  chart.addEventListener("pointermove", (event) => show(valueAt(event)));
  chart.addEventListener("pointerdown", (event) => show(valueAt(event)));
  chart.addEventListener("pointerleave", clear);
  chart.addEventListener("blur", clear);
  chart.addEventListener("keydown", (event) => {
    const jump = { ArrowLeft: -1, ArrowRight: 1, PageDown: -10, PageUp: 10, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") return clear();
    if (jump === undefined) return undefined;
    event.preventDefault();
    const now = at === null ? all.length - 1 : nearest(all, at) + jump;
    return show(all[Math.max(0, Math.min(all.length - 1, now))]);
  });
}
