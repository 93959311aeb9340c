// Search over everything that has a name: parts, parameters, values, operations, and the user's lines.

const MOST = 12; // results of a kind

function find(text) {
  const asked = text.trim().toLowerCase().replace(/^%/, "");
  if (!asked) return [];
  return [...findParts(asked), ...findParameters(asked), ...findValues(asked), ...findOperations(asked), ...findLines(asked)];
}

const rank = (name, asked) => (name === asked ? 0 : name.startsWith(asked) ? 1 : 2);

function findParts(asked) {
  const found = parts.filter((part) => part.name.toLowerCase().includes(asked));
  return found
    .sort((a, b) => rank(a.name.toLowerCase(), asked) - rank(b.name.toLowerCase(), asked))
    .slice(0, MOST / 2)
    .map((part) => ({ kind: "part", name: part.name, where: "", go: { part: part.index, view: "graph", value: "", find: "" } }));
}

/** Parameters by any of their names; those of equal layers are one result, unless the text says which layer. */
function findParameters(asked) {
  const found = [];
  for (const group of data.parameters) {
    const all = group.placeholders.map((one) => parameterAt.get(one));
    const hits = all.filter(
      (one) =>
        one.full.toLowerCase().includes(asked) ||
        group.placeholders[one.place].toLowerCase().includes(asked) ||
        group.twins?.some((twin) => twin.toLowerCase().includes(asked)),
    );
    if (!hits.length) continue;
    const exact = hits.length < all.length ? hits : [hits.find((one) => one.part === state.part) ?? hits[0]];
    for (const one of exact.slice(0, 4)) {
      const more = hits.length > 1 && exact.length === 1 ? `and in ${hits.length - 1} equal layers` : `${group.type}${group.layout ?? ""}`;
      found.push({ kind: "parameter", name: one.full, where: more, go: { view: "weights", part: one.part, weight: one.full, find: "" } });
    }
  }
  return found.sort((a, b) => rank(a.name.toLowerCase(), asked) - rank(b.name.toLowerCase(), asked)).slice(0, MOST);
}

/** Values by name, in the pass that is shown if it has them, else in the last one that does. */
function findValues(asked) {
  const now = state.pass === EMIT ? data.passes.length - 1 : state.pass;
  const order = [now, ...graphPasses.toReversed().filter((pass) => pass !== now)];
  const found = new Map();
  const digits = /\d/.test(asked);
  for (const pass of order) {
    const seen = new Set();
    for (const part of parts) {
      const template = templates[pass].get(part.index);
      if (template === undefined || (!digits && seen.has(template))) continue;
      seen.add(template);
      const { names, lines: packed } = data.templates[template];
      for (const line of packed) {
        if (line.name === undefined || line.kind === "parameter") continue;
        const name = spell(names[line.name], number(part.index));
        if (!found.has(name) && name.toLowerCase().includes(asked))
          found.set(name, {
            kind: "value",
            name: `%${name}`,
            where: `${part.label}${pass === now ? "" : `, ${passName(pass)}`}`,
            go: { view: "graph", part: part.index, pass, value: name, find: "" },
          });
      }
      if (found.size > 400) break;
    }
    if (found.size >= MOST) break;
  }
  return [...found]
    .sort(([a], [b]) => rank(a.toLowerCase(), asked) - rank(b.toLowerCase(), asked) || a.length - b.length)
    .slice(0, MOST)
    .map(([, one]) => one);
}

/** Operations, with how often the pass that is shown has them; chosen, all of them are marked. */
function findOperations(asked) {
  const pass = state.pass === EMIT || !data.passes[state.pass].graph ? data.passes.length - 1 : state.pass;
  const counts = new Map();
  for (const part of parts) {
    const template = templates[pass].get(part.index);
    if (template === undefined) continue;
    for (const line of data.templates[template].lines) {
      if (!line.op || line.kind === "return" || !line.op.toLowerCase().includes(asked)) continue;
      const known = counts.get(line.op) ?? { count: 0, part: part.index };
      known.count++;
      if (part.index === state.part) known.part = part.index;
      counts.set(line.op, known);
    }
  }
  return [...counts]
    .sort(([, a], [, b]) => b.count - a.count)
    .slice(0, MOST)
    .map(([op, { count, part }]) => ({
      kind: "operation",
      name: op,
      where: `${whole(count)} after ${passName(pass)}`,
      go: { view: "graph", part, pass, value: "", find: op },
    }));
}

/** The user's lines, by their text or as file:line. */
function findLines(asked) {
  const found = [];
  data.lines.forEach((source, index) => {
    if (found.length >= MOST || !`${lineLabel(source)}  ${source[2]}`.toLowerCase().includes(asked)) return;
    const at = place(index);
    if (at) found.push({ kind: "line", name: source[2], where: lineLabel(source), go: { view: "graph", ...at, find: "" } });
  });
  return found;
}

/** Where a line's first value is, in this pass or in the first one. */
function place(source) {
  const now = state.pass === EMIT || !data.passes[state.pass].graph ? data.passes.length - 1 : state.pass;
  for (const pass of [now, 0]) {
    for (const part of [parts[state.part], ...parts]) {
      const template = templates[pass].get(part.index);
      const line =
        template === undefined ? undefined : data.templates[template].lines.find((one) => one.source === source && one.name !== undefined);
      if (line) return { part: part.index, pass, value: spell(data.templates[template].names[line.name], number(part.index)) };
    }
  }
  return null;
}

// ------------------------------------------------------------------------------------------------- the box

let results = [],
  chosen = 0;

function drawResults() {
  const query = $("query"),
    list = $("results");
  results = find(query.value);
  chosen = 0;
  const none = !results.length && query.value.trim();
  list.replaceChildren(...results.map(resultRow), ...(none ? [el("li", { class: "none", text: "Nothing has this in its name." })] : []));
  list.hidden = !query.value.trim();
  query.setAttribute("aria-expanded", String(!list.hidden));
  point_at(0);
}

function resultRow(result, index) {
  const asked = $("query").value.trim().toLowerCase().replace(/^%/, "");
  const start = result.name.toLowerCase().indexOf(asked);
  const name =
    start < 0
      ? [result.name]
      : [
          result.name.slice(0, start),
          el("mark", { text: result.name.slice(start, start + asked.length) }),
          result.name.slice(start + asked.length),
        ];
  return el(
    "li",
    {
      role: "option",
      id: `result-${index}`,
      on: { mousedown: (event) => event.preventDefault(), click: () => take(index), pointermove: () => point_at(index) },
    },
    el("span", { class: "what", text: result.kind }),
    el("span", {}, el("code", {}, ...name), el("span", { class: "where", text: result.where })),
  );
}

function point_at(index) {
  chosen = index;
  [...$("results").children].forEach((row, place) => row.setAttribute("aria-selected", String(place === index && results.length > 0)));
  $("query").setAttribute("aria-activedescendant", results.length ? `result-${index}` : "");
}

function take(index) {
  if (!results[index]) return;
  closeResults();
  $("query").blur();
  go(results[index].go);
}

function closeResults() {
  $("results").hidden = true;
  $("query").setAttribute("aria-expanded", "false");
}

function listenToSearch() {
  const query = $("query");
  query.addEventListener("input", drawResults);
  query.addEventListener("focus", () => query.value && drawResults());
  query.addEventListener("blur", closeResults);
  query.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step && results.length) {
      point_at((chosen + step + results.length) % results.length);
      $(`result-${chosen}`).scrollIntoView({ block: "nearest" });
      event.preventDefault();
    } else if (event.key === "Enter") take(chosen);
    else if (event.key === "Escape") {
      query.value = "";
      query.blur();
    }
  });
}
