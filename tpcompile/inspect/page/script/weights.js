// Every parameter, and the strips of it that each tensor rank owns.

function drawWeights() {
  const scope = state.all ? data.parameters : data.parameters.filter((group) => group.parts.includes(state.part));
  const groups = scope.length ? scope : data.parameters;
  if (!state.weight || !groups.includes(parameterNamed.get(state.weight)?.group)) {
    const best = groups.toSorted((a, b) => interest(b) - interest(a))[0];
    state.weight = best ? nameIn(best) : "";
  }
  const chosen = parameterNamed.get(state.weight);
  const all = el(
    "label",
    { class: "row-of", style: "gap: 5px; padding: 0 16px 6px" },
    el("input", { type: "checkbox", id: "all", on: { change: () => go({ all: !state.all }) } }),
    "of all parts",
  );
  all.firstChild.checked = state.all || !scope.length;
  const list = el("div", { class: "list-side" }, all);
  let head = "";
  for (const group of groups) {
    const title = titleOf(group);
    if (title !== head) list.append(el("h3", { text: title }));
    head = title;
    list.append(weightRow(group, chosen?.group === group));
  }
  $("view").replaceChildren(
    el("div", { class: "weights" }, list, el("div", { class: "draw-side", id: "weight" }, ...(chosen ? drawWeight(chosen) : []))),
  );
}

/** What to draw first: what is cut in several segments, then the largest. */
const interest = (group) =>
  (group.cuts?.[0]?.segments.length ?? 0) * 1e18 + (group.cuts?.length ? 1e15 : 0) + group.shape.reduce((a, b) => a * b, 1);

const nameIn = (group) => {
  const place = Math.max(group.parts.indexOf(state.part), 0);
  return parameterAt.get(group.placeholders[place]).full;
};

function titleOf(group) {
  const first = parts[group.parts[0]];
  if (first.number === undefined) return first.label;
  return `${first.name.slice(0, first.name.lastIndexOf("."))}.${ranges(group.parts.map(number))}`;
}

function weightRow(group, pressed) {
  const layout = group.layout ?? `[${group.shape.join(", ")}]`;
  return button(
    { class: "one", "aria-pressed": String(pressed), "data-weight": nameIn(group), on: { click: () => go({ weight: nameIn(group) }) } },
    el("span", { class: "name", text: group.name.replace(/^\//, "") }),
    lanes(group, 120, 16),
    el("span", { class: `shape ${group.cuts?.length ? "cut" : "whole"}`, text: `${group.type}${layout}` }),
    el("span", { class: "number dim", text: bytes(Math.max(...heldBy(group))) }),
  );
}

const elements = (group) => group.shape.reduce((a, b) => a * b, 1);
const held = (cut, rank) => cut.ranks[rank].reduce((sum, [from, to]) => sum + to - from, 0);

/** The bytes that each tensor rank holds. */
const heldBy = (group) =>
  Array.from(
    { length: data.mesh.tp },
    (_, rank) => group.item * (group.cuts ?? []).reduce((size, cut) => (size / group.shape[cut.dim]) * held(cut, rank), elements(group)),
  );

/** A thin lane for each rank: where along the cut dimension its strips lie. */
function lanes(group, width, height) {
  const cut = group.cuts?.[0];
  const drawn = svg("svg", { class: "strips", width, height, "aria-hidden": "true" });
  if (!cut) {
    drawn.append(svg("rect", { class: "everyone", width, height }));
    return drawn;
  }
  const size = group.shape[cut.dim],
    high = height / data.mesh.tp;
  cut.ranks.forEach((own, rank) =>
    own.forEach(([from, to]) =>
      drawn.append(
        svg("rect", {
          class: "own",
          x: (width * from) / size,
          width: Math.max((width * (to - from)) / size, 0.5),
          y: rank * high,
          height: high > 2 ? high - 0.5 : Math.max(high, 1),
          vars: { "--h": hue(rank) },
        }),
      ),
    ),
  );
  return drawn;
}

// --------------------------------------------------------------------------------------------- one weight

function drawWeight({ group, full, place }) {
  const layout = `${group.type}${group.layout ?? `[${group.shape.join(", ")}]`}`;
  const facts = el("dl", { class: "facts" });
  const fact = (term, ...what) => facts.append(el("dt", { text: term }), el("dd", {}, ...what));
  fact("layout", el("code", { class: group.cuts?.length ? "cut" : "whole", text: layout }));
  fact("elements", `${whole(elements(group))}, ${bytes(elements(group) * group.item)}${group.trained ? "" : ", not trained"}`);
  fact("stage", ranges(group.stages[place]) || "none uses it");
  if (group.region) fact("region", el("code", { text: group.region.replace(/^\//, "") }));
  if (group.why) fact("whole, since", group.why);
  if (group.twins) fact("also", el("code", { text: group.twins.join(", ") }));
  if (group.parts.length > 1) fact("the same in", `${group.parts.length} layers: ${ranges(group.parts.map(number))}`);
  const made = [el("h2", { class: "mono", text: full }), el("div", { style: "height: 8px" }), facts];
  const cut = group.cuts?.[0];
  if (!cut)
    return [
      ...made,
      el("p", {
        class: "dim",
        text: data.mesh.tp > 1 ? "Every tensor rank holds all of it." : "There is one tensor rank, which holds all of it.",
      }),
    ];
  return [...made, el("div", { style: "margin: 16px 0 10px; overflow-x: auto" }, matrix(group, cut)), holders(group, cut)];
}

/** The matrix, its strips in the colours of their owners; a strip that several ranks own is divided among them. */
function matrix(group, cut) {
  const across = cut.dim === group.shape.length - 1 && group.shape.length > 1;
  const size = group.shape[cut.dim];
  const other = elements(group) / size;
  const long = across ? 460 : 330;
  const wide = group.shape.length === 1 ? 44 : Math.max(90, Math.min(190, (long * other) / size));
  const left = across ? 4 : 62,
    top = across ? 30 : 20;
  const width = across ? long : wide,
    height = across ? wide : long;
  const labels = cut.segments.length > 1 || cut.segments[0][1].includes("·");
  const [full, high] = [left + width + (across ? 12 : labels ? 260 : 20), top + height + (across && labels ? 48 : 16)];
  const drawn = svg("svg", { class: "strips", width: full, viewBox: `0 0 ${full} ${high}`, role: "img", "aria-label": "strips by rank" });
  const at = (index) => (long * index) / size;
  const box = (from, to, share, of, extra) =>
    across
      ? svg("rect", { x: left + at(from), width: at(to - from), y: top + (height * share) / of, height: height / of, ...extra })
      : svg("rect", { y: top + at(from), height: at(to - from), x: left + (width * share) / of, width: width / of, ...extra });
  for (const [from, to, owners] of intervals(cut)) {
    owners.forEach((rank, share) => {
      drawn.append(
        box(from, to, share, owners.length, { class: "own", "data-rank": rank, "data-range": `${from}:${to}`, vars: { "--h": hue(rank) } }),
      );
      const room = across ? Math.min(at(to - from), height / owners.length) : Math.min(at(to - from), width / owners.length);
      const [x, y] = across
        ? [left + at((from + to) / 2), top + (height * (share + 0.5)) / owners.length]
        : [left + (width * (share + 0.5)) / owners.length, top + at((from + to) / 2)];
      if (room >= 11) drawn.append(svg("text", { class: "on", x, y }, String(rank)));
    });
    drawn.append(
      across
        ? svg("line", { x1: left + at(from), x2: left + at(from), y1: top, y2: top + height })
        : svg("line", { y1: top + at(from), y2: top + at(from), x1: left, x2: left + width }),
    );
  }
  drawn.append(svg("rect", { class: "frame", x: left, y: top, width, height }));
  let index = 0;
  for (const [length, text, label] of cut.segments) {
    drawn.append(
      across
        ? svg("line", { class: "tick", x1: left + at(index), x2: left + at(index), y1: top - 8, y2: top + height + 8 })
        : svg("line", { class: "tick", y1: top + at(index), y2: top + at(index), x1: left - 8, x2: left + width + 8 }),
    );
    drawn.append(
      across
        ? svg("text", { class: "faint", x: left + at(index) + 3, y: top - 6 }, whole(index))
        : svg("text", { class: "faint", x: left - 12, y: top + at(index) + (index ? 4 : 8), "text-anchor": "end" }, whole(index)),
    );
    if (labels) {
      const [x, y] = across
        ? [left + at(index) + 3, top + height + 18]
        : [left + width + 14, top + at(index + length / 2) - (label ? 2 : -4)];
      if (label) drawn.append(svg("text", { x, y, "font-weight": 600 }, label));
      const room = across ? at(length) / 6.8 - 1 : 34;
      if (text.length <= room || !label)
        drawn.append(
          svg("text", { class: "faint", x, y: y + (label ? 15 : 0) }, text.length > room ? `${text.slice(0, room - 1)}…` : text),
        );
    }
    index += length;
  }
  drawn.append(
    across
      ? svg("text", { class: "faint", x: left + width, y: top - 6, "text-anchor": "end" }, whole(size))
      : svg("text", { class: "faint", x: left - 12, y: top + height, "text-anchor": "end" }, whole(size)),
  );
  return drawn;
}

/** Stretches of the dimension that the same ranks own. */
function intervals(cut) {
  const ends = new Set();
  cut.ranks.forEach((own) => own.forEach(([from, to]) => ends.add(from).add(to)));
  const sorted = [...ends].sort((a, b) => a - b);
  const owners = new Map(sorted.slice(0, -1).map((from) => [from, []]));
  cut.ranks.forEach((own, rank) =>
    own.forEach(([from, to]) => {
      for (let place = sorted.indexOf(from); sorted[place] < to; place++) owners.get(sorted[place]).push(rank);
    }),
  );
  return sorted
    .slice(0, -1)
    .map((from, place) => [from, sorted[place + 1], owners.get(from)])
    .filter(([, , own]) => own.length);
}

function holders(group, cut) {
  const sizes = heldBy(group);
  const rows = cut.ranks.map((own, rank) =>
    el(
      "tr",
      {},
      el("td", {}, el("span", { class: "swatch", vars: { "--h": hue(rank) } }), `tp ${rank}`),
      el("td", { class: "mono", text: own.map(([from, to]) => `${from}:${to}`).join("  ") || "nothing" }),
      el("td", { class: "number", text: whole(held(cut, rank)) }),
      el("td", { class: "number", text: bytes(sizes[rank]) }),
    ),
  );
  const along = ["rows", "columns"][cut.dim] && group.shape.length === 2 ? ["rows", "columns"][cut.dim] : `dimension ${cut.dim}`;
  return el(
    "table",
    { id: "holders" },
    el(
      "tr",
      {},
      el("th", { text: "rank" }),
      el("th", { text: along }),
      el("th", { class: "number", text: "in all" }),
      el("th", { class: "number", text: "bytes" }),
    ),
    ...rows,
  );
}
