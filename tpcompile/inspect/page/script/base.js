// What all views share: the data, the names of values, the state and its place in the address, and small makers of elements.
// Everything that comes from the model reaches the page as text: elements are made one by one, and never parsed from strings.

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);

function el(tag, given = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(given)) {
    if (value === undefined || value === null || value === false) continue;
    if (key === "class") made.className = value;
    else if (key === "text") made.textContent = value;
    else if (key === "on") for (const [event, act] of Object.entries(value)) made.addEventListener(event, act);
    else if (key === "vars") for (const [name, one] of Object.entries(value)) made.style.setProperty(name, one);
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

function svg(tag, given = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(given)) {
    if (key === "vars") for (const [name, one] of Object.entries(value)) made.style.setProperty(name, one);
    else if (value !== undefined && value !== null) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const button = (given, ...children) => el("button", { type: "button", ...given }, ...children);

// ------------------------------------------------------------------------------------------------ numbers

const whole = (number) => number.toLocaleString("en-US");

function bytes(size, digits = 4) {
  for (const [unit, name] of [
    [2 ** 40, "TiB"],
    [2 ** 30, "GiB"],
    [2 ** 20, "MiB"],
    [2 ** 10, "KiB"],
  ]) {
    if (size >= unit) return `${Number((size / unit).toPrecision(digits))} ${name}`;
  }
  return `${size} B`;
}

function short(number) {
  for (const [unit, name] of [
    [1e12, "T"],
    [1e9, "B"],
    [1e6, "M"],
    [1e3, "k"],
  ]) {
    if (number >= unit) return `${Number((number / unit).toPrecision(4))} ${name}`;
  }
  return String(number);
}

const percent = (share) => `${(100 * share).toFixed(1)} %`;
const hue = (rank) => Math.round((215 + (360 * rank) / data.mesh.tp) % 360);

// -------------------------------------------------------------------------------------------------- names

/** A name of a template in its layer i: itself, or texts with a number between each two; some layers have a name of their own. */
function spell(entry, i) {
  if (typeof entry === "string") return entry;
  const [texts, numbers, others] = entry;
  if (others && i in others) return others[i];
  let name = texts[0];
  for (let place = 0; place < numbers.length; place++) {
    const rule = numbers[place];
    name += (Array.isArray(rule) ? rule[0] + rule[1] * i : rule[i]) + texts[place + 1];
  }
  return name;
}

const parts = data.parts.map((part, index) => ({ ...part, index, label: part.name || data.model }));
const partOf = new Map(parts.map((part) => [part.name, part]));
const number = (index) => parts[index].number ?? 0;

/** Per pass, the template of each part. */
const templates = data.passes.map((pass) => new Map(pass.parts));

/** The end of a part's path, as much of it as no other part ends with: model.layers.5 → layers.5. */
const briefs = (() => {
  const ends = (part) => {
    const names = part.label.split(".");
    return names
      .map((_, from) => names.slice(from).join("."))
      .reverse()
      .slice(part.number === undefined ? 0 : 1);
  };
  const count = new Map();
  for (const part of parts) for (const end of ends(part)) count.set(end, (count.get(end) ?? 0) + 1);
  return parts.map((part) => ends(part).find((end) => count.get(end) === 1) ?? part.label);
})();
const brief = (part) => briefs[part.index];

/** A layer's stack, as brief. */
const stackOf = (part) => brief(part).slice(0, brief(part).lastIndexOf("."));

/** Parameters by the names of their placeholders, and by their names in the model. */
const parameterAt = new Map();
const parameterNamed = new Map();
data.parameters.forEach((group, index) => {
  group.parts.forEach((part, place) => {
    const full = group.name.startsWith("/") ? group.name.slice(1) : [parts[part].name, group.name].filter(Boolean).join(".");
    const found = { group, index, part, place, full };
    parameterAt.set(group.placeholders[place], found);
    parameterNamed.set(full, found);
  });
});

/** How a value is written where it is used: a parameter by its name in the module, anything else as in the graph. */
function shown(name, part) {
  const parameter = parameterAt.get(name);
  if (!parameter) return `%${name}`;
  return parameter.part === part ? parameter.group.name.replace(/^\//, "") : parameter.full;
}

/** The lines of a part after a pass, with all names spelled. */
const linesMade = new Map();
function lines(pass, part) {
  const template = pass === null || pass === undefined ? undefined : templates[pass].get(part);
  if (template === undefined) return [];
  const key = `${template} ${number(part)}`;
  if (!linesMade.has(key)) {
    if (linesMade.size > 400) linesMade.clear();
    const { names, lines: packed } = data.templates[template];
    const known = names.map((entry) => spell(entry, number(part)));
    linesMade.set(
      key,
      packed.map((line) => ({
        ...line,
        name: line.name === undefined ? "" : known[line.name],
        tokens: (line.tokens ?? []).map((token) => (typeof token === "string" ? token : { name: known[token] })),
      })),
    );
  }
  return linesMade.get(key);
}

/** How every value of a pass lies on the ranks: whole, cut or partial. */
const statesMade = new Map();
function states(pass) {
  if (!statesMade.has(pass)) {
    const found = new Map();
    for (const part of pass === null || pass === undefined ? [] : templates[pass].keys()) {
      const { names, lines: packed } = data.templates[templates[pass].get(part)];
      for (const line of packed) if (line.state && line.name !== undefined) found.set(spell(names[line.name], number(part)), line.state);
    }
    statesMade.set(pass, found);
  }
  return statesMade.get(pass);
}

/** A line as text: what is compared, and what is searched. */
const textOf = (line) =>
  [line.name, line.op, ...line.tokens.map((token) => (typeof token === "string" ? token : `%${token.name}`)), line.type].join(" ");

const lineLabel = (source) => `${source[0].split("/").at(-1)}:${source[1]}`;

// -------------------------------------------------------------------------------------------------- state

const VIEWS = ["model", "graph", "weights", "schedule", "traffic"];
const graphPasses = data.passes.map((pass, index) => index).filter((index) => data.passes[index].graph);
const firstPass = () =>
  Math.max(
    data.passes.findIndex((pass) => pass.name === "rewrite"),
    0,
  );
const state = {
  view: "model",
  part: parts.find((part) => part.number !== undefined)?.index ?? 0,
  pass: firstPass(),
  value: "",
  changes: false,
  weight: "",
  rank: 0,
  all: false,
  find: "",
};

const EMIT = data.passes.length; // the place of the source in the row of passes
const passName = (index) => (index === EMIT ? "emit" : data.passes[index].name);

function address() {
  const said = new URLSearchParams({ view: state.view, part: parts[state.part].name, pass: passName(state.pass) });
  if (state.value) said.set("value", state.value);
  if (state.weight) said.set("weight", state.weight);
  if (state.changes) said.set("changes", "1");
  if (state.rank) said.set("rank", state.rank);
  return `#${said}`;
}

function readAddress() {
  const said = new URLSearchParams(location.hash.slice(1));
  if (VIEWS.includes(said.get("view"))) state.view = said.get("view");
  if (partOf.has(said.get("part"))) state.part = partOf.get(said.get("part")).index;
  const pass = said.get("pass") === "emit" && data.sources.length ? EMIT : data.passes.findIndex((one) => one.name === said.get("pass"));
  if (pass >= 0) state.pass = pass;
  state.value = said.get("value") ?? "";
  if (parameterNamed.has(said.get("weight"))) state.weight = said.get("weight");
  state.changes = said.get("changes") === "1";
  const rank = Number(said.get("rank"));
  if (Number.isInteger(rank) && rank >= 0 && rank < data.mesh.size) state.rank = rank;
  if (["light", "dark"].includes(said.get("theme"))) document.documentElement.dataset.theme = said.get("theme");
}

/** Change the state, and draw what depends on it. */
function go(change) {
  Object.assign(state, change);
  try {
    history.replaceState(null, "", address());
  } catch {
    // a page inside of another has no address of its own
  }
  draw();
}
