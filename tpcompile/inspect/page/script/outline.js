// The stages and their layers, equal layers as one row: the way to any part of the model.

/** What makes two layers equal: the same graph after every pass, and the same parameters. */
const kinds = new Map();
const kindOf = parts.map((part) => {
  const held = data.parameters.map((group, index) => (group.parts.includes(part.index) ? index : -1)).filter((index) => index >= 0);
  const key = JSON.stringify([graphPasses.map((pass) => templates[pass].get(part.index) ?? -1), held]);
  if (!kinds.has(key)) kinds.set(key, kinds.size);
  return kinds.get(key);
});

/** The rows of a stage: parts, and runs of equal layers. What stages before it compute too, such as a mask, is shown there. */
function rowsOf(stage) {
  const rows = [];
  for (const [part, flops, again] of data.stages[stage].parts) {
    if (again) continue;
    const last = rows.at(-1);
    const before = last?.parts.at(-1);
    const follows = before !== undefined && parts[part].number !== undefined && parts[part].number === parts[before].number + 1;
    if (follows && kindOf[before] === kindOf[part]) {
      last.parts.push(part);
      last.flops += flops;
    } else rows.push({ parts: [part], flops });
  }
  return rows;
}

const stageParts = new Map();
data.stages.forEach((stage, index) =>
  stage.parts.forEach(([part, flops]) => {
    if (!stageParts.has(part)) stageParts.set(part, []);
    stageParts.get(part).push([index, flops]);
  }),
);
const stagesOf = (part) => (stageParts.get(part) ?? []).map(([stage]) => stage);

/** All layers that are equal to a part, itself too. */
const equals = (part) =>
  parts[part].number === undefined ? [part] : parts.filter((other) => kindOf[other.index] === kindOf[part]).map((other) => other.index);

function ranges(numbers) {
  const runs = [];
  for (const one of numbers) {
    if (runs.length && runs.at(-1)[1] + 1 === one) runs.at(-1)[1] = one;
    else runs.push([one, one]);
  }
  return runs.map(([from, to]) => (from === to ? `${from}` : `${from}–${to}`)).join(", ");
}

const opened = new Set();

function drawOutline() {
  const total = Math.max(...data.stages.map((stage) => stage.flops), 1);
  const made = [];
  data.stages.forEach((stage, index) => {
    const several = data.stages.length > 1;
    made.push(el("h2", {}, several ? `stage ${index}` : "layers", several && el("span", { text: `pipeline rank ${stage.place}` })));
    made.push(el("ul", {}, ...rowsOf(index).flatMap((row) => outlineRows(row, index, total))));
  });
  const left = parts.filter((part) => !stageParts.has(part.index) && templates.some((own) => own.has(part.index)));
  if (left.length) made.push(el("h2", { text: "computes nothing" }), el("ul", {}, ...left.map((part) => partRow(part.index, brief(part)))));
  $("outline").replaceChildren(...made);
}

function outlineRows(row, stage, total) {
  const first = row.parts[0];
  const bar = el(
    "span",
    { class: "bar", title: `${short(row.flops)}FLOPs forward` },
    el("i", { vars: { width: `${(100 * row.flops) / total}%` } }),
  );
  if (row.parts.length === 1) return [partRow(first, brief(parts[first]), { bar, stage })];
  const key = `${stage} ${first}`;
  const open = opened.has(key);
  const label = `${stackOf(parts[first])}.${parts[first].number}–${parts[row.parts.at(-1)].number}`;
  const toggle = () => {
    if (open) opened.delete(key);
    else opened.add(key);
    drawOutline();
  };
  const head = partRow(row.parts.includes(state.part) ? state.part : first, label, {
    bar,
    stage,
    count: row.parts.length,
    toggle,
    open,
    current: !open && row.parts.includes(state.part),
  });
  return open ? [head, ...row.parts.map((part) => partRow(part, brief(parts[part]), { inner: true, stage }))] : [head];
}

function partRow(part, label, { bar, count, toggle, open, inner, stage, current = state.part === part && !open } = {}) {
  const choose = () => go({ part, value: "", weight: "", view: ["graph", "weights"].includes(state.view) ? state.view : "graph" });
  const fold = toggle
    ? button({
        class: "fold",
        "data-fold": `${stage} ${part}`,
        text: open ? "▾" : "▸",
        title: "show each layer",
        "aria-expanded": String(Boolean(open)),
        on: { click: toggle },
      })
    : el("span", { class: "fold" });
  return el(
    "li",
    {
      class: inner ? "row inner" : "row",
      "aria-current": current ? "true" : undefined,
      "data-part": parts[part].name,
      "data-stage": stage,
    },
    fold,
    button(
      { class: "part", "data-row": `${stage} ${part}`, title: parts[part].label, on: { click: choose } },
      el("span", { class: "label", text: label }),
      count && el("span", { class: "count", text: `×${count}` }),
      bar,
    ),
  );
}
