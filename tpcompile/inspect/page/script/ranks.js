// The model as layers × stages × ranks: which layers a stage runs, and what each of its ranks holds.

/** A rank's number, from its places on the axes; axes nest in the mesh's order, the last one fastest. */
const rankAt = (places) => data.mesh.order.reduce((rank, axis) => rank * data.mesh[axis] + places[axis], 0);

function placesOf(rank) {
  const found = {};
  for (const axis of data.mesh.order.toReversed()) {
    found[axis] = rank % data.mesh[axis];
    rank = Math.floor(rank / data.mesh[axis]);
  }
  return found;
}

function drawModel() {
  const { mesh } = data;
  const here = placesOf(state.rank);
  const mode = data.options["data parallel"];
  const replica =
    mesh.dp > 1 &&
    el(
      "span",
      { class: "row-of" },
      el("label", { for: "replica", text: "replica" }),
      el("input", {
        id: "replica",
        class: "small-input",
        type: "number",
        min: 0,
        max: mesh.dp - 1,
        value: here.dp,
        on: {
          change: (event) => {
            const dp = Math.min(Math.max(Math.trunc(Number(event.target.value)) || 0, 0), mesh.dp - 1);
            go({ rank: rankAt({ ...here, dp }) });
          },
        },
      }),
      el("span", {
        class: "dim",
        text: `of ${mesh.dp}; all hold the same parameters${mode === "ddp" ? "" : `, shared out by ${mode}`}`,
      }),
    );
  const head = el(
    "div",
    { class: "row-of", style: "margin-bottom: 8px" },
    el("h2", { text: "Layers, stages and ranks" }),
    replica || null,
    el(
      "span",
      { class: "legend", style: "margin-left: auto" },
      el("span", {}, el("i", { class: "cut" }), "share of its parameters that is cut"),
      el("span", {}, el("i", { style: "color: var(--line)" }), "whole on every tensor rank"),
    ),
  );
  const table = el(
    "table",
    { class: "stages", id: "stages" },
    el(
      "tr",
      {},
      ...[
        "stage",
        "layers, in order",
        "sends on",
        "compute, state",
        mesh.tp > 1 ? "ranks, and the parameters on each" : "rank, and its parameters",
      ].map((text, place) => el("th", { text, class: place === 3 ? "number" : undefined })),
    ),
  );
  const total = data.stages.reduce((sum, stage) => sum + stage.flops, 0) || 1;
  const most = Math.max(...data.stages.flatMap((stage) => stage.parameters));
  data.stages.forEach((stage, index) => {
    table.append(
      el(
        "tr",
        { "data-stage": index },
        el(
          "td",
          {},
          el("b", { text: index }),
          el("span", { class: "dim", text: data.stages.length > mesh.pp ? ` on pp ${stage.place}` : "" }),
        ),
        el("td", {}, el("div", { class: "cells" }, ...cellsOf(index))),
        el("td", { class: "sent" }, ...stage.sends.map(crossing)),
        el(
          "td",
          {
            class: "number",
            title:
              "share of the forward FLOPs; bytes of parameters, gradients, two moments and what is gathered besides, without activations",
          },
          percent(stage.flops / total),
          el("small", { class: "dim", text: bytes(stage.memory.most, 3) }),
        ),
        el("td", {}, el("div", { class: "ranks" }, ...stage.parameters.map((size, tp) => rankCell(stage, tp, size, here, most)))),
      ),
    );
  });
  $("view").replaceChildren(
    el("div", { class: "pad" }, head, table, el("div", { class: "two" }, rankFacts(here), compiledHow()), ...leftWhole()),
  );
}

const shareCut = parts.map((part) => {
  const own = data.parameters.filter((group) => group.parts.includes(part.index));
  const size = own.reduce((sum, group) => sum + elements(group), 0);
  return size ? own.filter((group) => group.cuts?.length).reduce((sum, group) => sum + elements(group), 0) / size : 0;
});

const stacks = new Set(parts.filter((part) => part.number !== undefined).map(stackOf));

/** The parts of a stage; where the model has several stacks of layers, each run of these has its stack's name before it. */
function cellsOf(stage) {
  let last = "";
  return rowsOf(stage)
    .flatMap((row) => row.parts)
    .flatMap((part) => {
      const stack = stacks.size > 1 && parts[part].number !== undefined ? stackOf(parts[part]) : "";
      const name = stack && stack !== last ? [el("span", { class: "stack", text: stack })] : [];
      last = stack;
      return [...name, partCell(part)];
    });
}

function partCell(part) {
  const { label } = parts[part];
  const text = parts[part].number === undefined ? brief(parts[part]) : String(parts[part].number);
  return button(
    {
      class: "cell",
      title: `${label}: ${percent(shareCut[part])} of its parameters are cut`,
      "aria-current": state.part === part ? "true" : undefined,
      "data-part": parts[part].name,
      vars: { "--share": `${100 * shareCut[part]}%` },
      on: { click: () => go({ part, view: "graph", value: "", weight: "" }) },
    },
    el("span", { text }),
  );
}

function rankCell(stage, tp, size, here, most) {
  const rank = rankAt({ dp: here.dp, pp: stage.place, tp });
  return button(
    {
      class: data.mesh.tp > 8 ? "rank narrow" : "rank",
      "aria-pressed": String(rank === state.rank),
      "data-rank": rank,
      title: `rank ${rank}: dp ${here.dp}, pp ${stage.place}, tp ${tp}; ${bytes(size)} of parameters, ${percent(size / most)} of the most`,
      vars: { "--h": hue(tp) },
      on: { click: () => go({ rank }) },
    },
    el("small", { text: rank }),
    el("b", { text: bytes(size, 3) }),
  );
}

/** What a stage hands to the next one, for each micro-batch. */
const crossing = (sent) =>
  el(
    "div",
    { title: `%${sent.name} : ${sent.type}, for each micro-batch${sent.gradient ? ", and its gradient back" : ""}` },
    el("span", { class: sent.state, text: `%${sent.name}` }),
    el("small", { text: `${sent.gradient ? "⇅" : "↓"} ${bytes(sent.bytes)}` }),
  );

/** The chosen rank: its coordinates, the groups that it talks to, and what it holds. */
function rankFacts(here) {
  const { mesh } = data;
  const facts = el("dl", { class: "facts", id: "rank" });
  const fact = (term, ...what) => facts.append(el("dt", { text: term }), el("dd", {}, ...what));
  fact("coordinates", mesh.order.map((axis) => `${axis} ${here[axis]}`).join(", "));
  for (const axis of mesh.order.toReversed()) {
    if (mesh[axis] < 2) continue;
    const group = Array.from({ length: mesh[axis] }, (_, place) => rankAt({ ...here, [axis]: place }));
    const near = group[1] - group[0] === 1;
    fact(
      `its ${axis} group`,
      near
        ? `ranks ${group[0]}–${group.at(-1)}`
        : `ranks ${[...group.slice(0, 4), ...(group.length > 4 ? [`… ${group.at(-1)}`] : [])].join(", ")}`,
    );
  }
  const own = data.stages.flatMap((stage, index) => (stage.place === here.pp ? [[stage, index]] : []));
  for (const [stage, index] of own) {
    const held = rowsOf(index).map((row) =>
      row.parts.length > 1 ? `${brief(parts[row.parts[0]])}–${parts[row.parts.at(-1)].number}` : brief(parts[row.parts[0]]),
    );
    fact(
      `stage ${index}`,
      el("code", { text: held.join(", ") }),
      ...(data.sources[index]
        ? [
            "  ",
            button({
              class: "link",
              text: "its source",
              on: {
                click: () =>
                  go({
                    view: "graph",
                    pass: EMIT,
                    value: "",
                    part: rowsOf(index).find((row) => stagesOf(row.parts[0]).at(-1) === index)?.parts[0] ?? state.part,
                  }),
              },
            }),
          ]
        : []),
    );
    const { memory } = stage;
    fact(
      "",
      `parameters ${bytes(stage.parameters[here.tp])}; gradients ${bytes(memory.gradients)}, two moments ${bytes(memory.moments)}; `,
      `in a step ${bytes(memory.most)} at most`,
    );
  }
  return el("div", { class: "block" }, el("h2", { text: `Rank ${state.rank}` }), facts);
}

function leftWhole() {
  if (!data.whole.length && !data.notes.length) return [];
  const rows = data.whole.map((left) =>
    el(
      "tr",
      {},
      el("td", { class: "mono", text: left.name }),
      el("td", { text: left.reason }),
      el("td", { class: "mono dim", title: left.source?.[0], text: left.source ? `${lineLabel(left.source)}  ${left.source[2]}` : "" }),
    ),
  );
  return [
    el("h2", { text: "What stays whole, and why" }),
    el("table", { id: "whole" }, ...rows),
    ...data.notes.map((note) => el("p", { text: note })),
  ];
}

function compiledHow() {
  const facts = el("dl", { class: "facts" });
  for (const [name, value] of Object.entries(data.options)) facts.append(el("dt", { text: name }), el("dd", { text: value }));
  return el("div", { class: "block" }, el("h2", { text: "Compiled with" }), facts);
}

// ------------------------------------------------------------------------------------------------ traffic

function drawTraffic() {
  const { rows, at } = data.traffic;
  const heads = ["group", "", "stage", "call", "count", "", "bytes that a rank gives", `at ${at}`, "sent in a ring", ""];
  const table = el(
    "table",
    { id: "traffic" },
    el("tr", {}, ...heads.map((text, place) => el("th", { text, class: place >= 5 && place % 2 ? "number" : undefined }))),
  );
  for (const row of rows) {
    table.append(
      el(
        "tr",
        {},
        el("td", { text: row.axis }),
        el("td", { class: "dim", text: row.direction }),
        el("td", { text: row.stages }),
        el("td", {}, el("span", { class: "chip", text: row.call })),
        ...row.formulas.flatMap((formula, place) => [
          el("td", { class: place ? "mono" : "mono once", text: formula }),
          el("td", {
            class: "number",
            title: whole(row.numbers[place]),
            text: place ? bytes(row.numbers[place]) : whole(row.numbers[place]),
          }),
        ]),
      ),
    );
  }
  const note =
    "What a rank hands to its groups in one step of training: m micro-batches, L layers of the stage, the sizes of a micro-batch.";
  $("view").replaceChildren(
    el(
      "div",
      { class: "pad" },
      el("h2", { text: "Calls in a step" }),
      el("p", { class: "dim", style: "margin: 0 0 10px", text: note }),
      table,
    ),
  );
}
