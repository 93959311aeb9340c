// A part of the model before and after a pass, side by side: lines that make the same value stand beside each other.

const same = (pass) => {
  if (pass === EMIT) return false;
  const before = data.passes[pass].before;
  return (
    before !== null &&
    data.passes[before].graph &&
    data.passes[pass].graph &&
    templates[before].get(state.part) === templates[pass].get(state.part)
  );
};

let drawn = ""; // what the sides show: where that stays, they stay scrolled as they are

function drawGraph() {
  const before = document.querySelector(".sides")?.scrollTop ?? 0;
  const now = JSON.stringify([state.part, state.pass, state.changes, state.find]);
  const emitted = state.pass === EMIT;
  const given = emitted ? data.passes.length - 1 : data.passes[state.pass].before;
  const body = el("div", { class: "sides", tabindex: "0", "aria-label": "before and after" });
  if (emitted) body.append(...emittedSides(given));
  else body.append(...passSides(given));
  if (body.children.length > 500) body.classList.add("many");
  const view = el("div", { class: "graph" }, graphTop(), body, state.value && dock());
  $("view").replaceChildren(view);
  if (now === drawn) body.scrollTop = before;
  const chosen = body.querySelector(".line.selected") ?? body.querySelector(".line.found");
  if (chosen) chosen.scrollIntoView({ block: now === drawn ? "nearest" : "center" });
  drawn = now;
}

function graphTop() {
  const part = parts[state.part];
  const equal = equals(state.part);
  const title = el("h2", { class: "mono", text: part.label });
  const place = equal.indexOf(state.part);
  const step = (by, name) =>
    button({
      class: "step",
      text: name,
      disabled: equal[place + by] === undefined,
      "aria-label": by < 0 ? "previous equal layer" : "next equal layer",
      on: { click: () => go({ part: equal[place + by], value: "" }) },
    });
  const stages = stagesOf(state.part);
  const where = stages.length ? `stage${stages.length > 1 ? "s" : ""} ${ranges(stages)}` : "";
  const folded =
    equal.length > 1 &&
    el(
      "span",
      { class: "row-of" },
      step(-1, "‹"),
      step(1, "›"),
      el("span", { class: "dim", text: `one of ${equal.length} equal layers: ${ranges(equal.map(number))}` }),
    );
  const changes = el(
    "label",
    { class: "row-of", style: "gap: 5px" },
    el("input", { type: "checkbox", id: "changes", on: { change: () => go({ changes: !state.changes }) } }),
    "changed lines only",
  );
  changes.firstChild.checked = state.changes;
  const passes = data.passes.map((pass, index) =>
    passButton(index, `${whole(pass.count)} operations in the whole graph; the pass took ${pass.seconds.toFixed(2)} s`),
  );
  if (data.sources.length) passes.push(passButton(EMIT, "the source that the ranks of this stage run"));
  return el(
    "div",
    { class: "bar-top" },
    el("div", { class: "row-of" }, title, el("span", { class: "dim", text: where }), folded || null, legend(), changes),
    el("div", { class: "passes", role: "group", "aria-label": "passes" }, ...passes),
  );
}

const passButton = (index, title) =>
  button({
    text: passName(index),
    title,
    class: same(index) ? "same" : undefined,
    "aria-pressed": String(state.pass === index),
    "data-pass": passName(index),
    on: { click: () => go({ pass: index }) },
  });

const legend = () =>
  el(
    "span",
    { class: "legend", style: "margin-left: auto" },
    ...[
      ["whole", "whole"],
      ["cut", "cut"],
      ["partial", "partial"],
    ].map(([kind, text]) => el("span", {}, el("i", { class: kind }), text)),
    el("span", {}, el("span", { class: "chip", text: "collective" })),
  );

// -------------------------------------------------------------------------------------------- both sides

function passSides(given) {
  const after = lines(state.pass, state.part);
  const pass = data.passes[state.pass];
  const first = given === null;
  const heads = el(
    "div",
    { class: "heads" },
    el("div", {}, "before: ", el("b", { text: first ? "the model's lines" : passName(given) })),
    el(
      "div",
      {},
      "after: ",
      el("b", { text: pass.name }),
      pass.graph
        ? `  ${after.filter((line) => ["operation", "collective"].includes(line.kind)).length} of ${whole(pass.count)} operations`
        : "",
    ),
  );
  if (!after.length && !lines(given, state.part).length)
    return [heads, el("div", { class: "empty", text: "Nothing of this part is here." })];
  const before = lines(given, state.part);
  const pairs = first ? userLines(after) : pass.graph ? align(before, after) : told(before, after, data.passes[given].graph);
  return [heads, ...rowsShown(pairs, states(given), states(state.pass))];
}

function rowsShown(pairs, before, after) {
  const near = pairs.map(
    (pair, index) => !state.changes || pairs.slice(Math.max(index - 2, 0), index + 3).some((one) => one.how !== "equal"),
  );
  const rows = [];
  let hidden = 0;
  pairs.forEach((pair, index) => {
    if (!near[index]) {
      hidden++;
      return;
    }
    if (hidden) rows.push(el("div", { class: "skip", text: `${hidden} equal line${hidden > 1 ? "s" : ""}` }));
    hidden = 0;
    const both = [side(pair.left, pair, "removed", "−", before), side(pair.right, pair, "added", "+", after)];
    if (pair.how === "changed") {
      markChanges(both[0], both[1]);
      markChanges(both[1], both[0]);
    }
    rows.push(el("div", { class: "line-pair" }, ...both));
  });
  if (hidden) rows.push(el("div", { class: "skip", text: `${hidden} equal line${hidden > 1 ? "s" : ""}` }));
  return rows;
}

function side(line, pair, word, mark, known) {
  if (!line) return el("div", { class: ["equal", "told"].includes(pair.how) ? "line" : "line void" });
  const how = pair.how === "differs" ? word : pair.how === "changed" ? "changed" : "";
  return lineElement(line, how, how === word ? mark : how ? "~" : "", known);
}

// ------------------------------------------------------------------------------------------------ source

function emittedSides(given) {
  const stages = stagesOf(state.part);
  const stage = stages.at(-1) ?? 0;
  const heads = el(
    "div",
    { class: "heads" },
    el("div", {}, "before: ", el("b", { text: passName(given) })),
    el("div", {}, "after: ", el("b", { text: `stage_${stage}.py` }), "  what its ranks run"),
  );
  const source = el(
    "div",
    { class: "source line", style: "padding: 0; text-indent: 0" },
    ...(data.sources[stage] ?? [])
      .map((place) => data.code[place])
      .map((line, index) => el("div", { class: /^\s*#/.test(line) ? "comment" : undefined, "data-line": index + 1, text: line })),
  );
  return [
    heads,
    el(
      "div",
      { class: "line-pair" },
      el("div", {}, ...lines(given, state.part).map((line) => lineElement(line, "", "", states(given)))),
      source,
    ),
  ];
}
