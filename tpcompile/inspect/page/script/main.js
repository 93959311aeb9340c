// The frame: header, tabs, colours of day and night, keys.

const TITLES = { model: "Model", graph: "Graph", weights: "Weights", schedule: "Schedule", traffic: "Traffic" };
const DRAW = { model: drawModel, graph: drawGraph, weights: drawWeights, schedule: drawSchedule, traffic: drawTraffic };

function drawTabs() {
  $("tabs").replaceChildren(
    ...VIEWS.map((view) =>
      button({
        role: "tab",
        id: `tab-${view}`,
        text: TITLES[view],
        "aria-selected": String(state.view === view),
        "aria-controls": "view",
        tabindex: state.view === view ? "0" : "-1",
        on: { click: () => go({ view }), keydown: moveTab },
      }),
    ),
  );
}

function moveTab(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const view = VIEWS[(VIEWS.indexOf(state.view) + step + VIEWS.length) % VIEWS.length];
  go({ view });
  $(`tab-${view}`).focus();
}

/** Draw all that the state decides; the place of the keyboard, and how far lists are scrolled, stay. */
function draw() {
  const focused = keyOf(document.activeElement);
  const list = document.querySelector(".list-side")?.scrollTop ?? 0;
  drawOutline();
  drawTabs();
  DRAW[state.view]();
  $("view").setAttribute("aria-labelledby", `tab-${state.view}`);
  document.querySelector(".list-side")?.scrollTo(0, list);
  $("outline").querySelector("[aria-current]")?.scrollIntoView({ block: "nearest" });
  if (focused) document.querySelector(focused)?.focus({ preventScroll: true });
}

/** How to find an element again after all is drawn anew; of a value, where it is used in the same line. */
function keyOf(element) {
  if (element?.id) return `#${CSS.escape(element.id)}`;
  const data = element?.dataset ?? {};
  const key = ["pass", "weight", "rank", "part", "row", "fold"].find((one) => data[one] !== undefined);
  if (key) return `button[data-${key}="${CSS.escape(data[key])}"]`;
  const line = element?.closest?.("[data-name]");
  return line && data.value !== undefined
    ? `[data-name="${CSS.escape(line.dataset.name)}"] [data-value="${CSS.escape(data.value)}"]`
    : null;
}

function drawHeader() {
  $("title").textContent = data.model;
  const { mesh } = data;
  const sizes = Object.entries(data.sizes)
    .map(([name, size]) => `${name}=${size}`)
    .join(", ");
  const facts = [
    ["mesh", mesh.text],
    ["ranks", whole(mesh.size)],
    ["parameters", short(data.elements)],
    ...(sizes ? [["micro-batch", sizes]] : []),
  ];
  $("facts").replaceChildren(...facts.map(([name, value]) => el("span", {}, `${name} `, el("b", { text: value }))));
}

const THEMES = ["auto", "light", "dark"];

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  $("theme").textContent = { auto: "◐ system", light: "○ light", dark: "● dark" }[theme];
  $("theme").setAttribute("aria-label", `colours: ${theme}; change`);
  try {
    localStorage.setItem("tpcompile.theme", theme);
  } catch {
    // a page in a sandbox remembers nothing
  }
}

function rememberedTheme() {
  try {
    return THEMES.includes(localStorage.getItem("tpcompile.theme")) ? localStorage.getItem("tpcompile.theme") : "auto";
  } catch {
    return "auto";
  }
}

function keys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input")) return;
  const step = { "[": -1, "]": 1 }[event.key];
  if (event.key === "/") {
    event.preventDefault();
    $("query").focus();
    $("query").select();
  } else if (step && state.view === "graph") {
    const last = data.sources.length ? EMIT : EMIT - 1;
    go({ pass: Math.min(Math.max(state.pass + step, 0), last) });
  } else if (event.key === "c" && state.view === "graph") go({ changes: !state.changes });
  else if (event.key === "Escape" && state.value) go({ value: "" });
}

setTheme(rememberedTheme());
readAddress();
drawHeader();
listenToSearch();
$("theme").addEventListener("click", () => setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "auto") + 1) % 3]));
document.addEventListener("keydown", keys);
document.addEventListener("pointerover", markUses);
document.addEventListener("click", chooseValue);
document.addEventListener("keydown", chooseValue);
window.addEventListener("hashchange", () => {
  readAddress();
  draw();
});
draw();
