// Shows the candidates of data/. Whatever a model, a task or a table wrote becomes text nodes,
// attributes that run nothing, or values of a form: never markup.
"use strict";
const $ = (id) => document.getElementById(id);
const arriving = {}, asked = {};
const index = new Promise((resolve) => { arriving.index = resolve; });
let columns, about, table, taskTable, modelTable;

// -- data: scripts that call register(), because a page from disk may not fetch --
window.register = async (name, packed) => {
  try {
    const bytes = Uint8Array.fromBase64?.(packed) ?? Uint8Array.from(atob(packed), (character) => character.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    arriving[name](await new Response(stream).json());
  } catch (error) { fail(error); }
};
const load = (name) => asked[name] ??= new Promise((resolve, reject) => {
  arriving[name] = resolve;
  const script = el("script");
  script.src = `data/${name}.js`;
  script.onerror = () => reject(Error(`data/${name}.js cannot be loaded: copy the whole folder, or write the viewer again`));
  document.head.append(script);
});
const details = async (i) => {
  const chunk = about.starts.findLastIndex((start) => start <= i);
  return (await load(about.chunks[chunk]))[i - about.starts[chunk]];
};
const fail = (error) => { $("message").textContent = String(error.message ?? error); $("message").hidden = false; };

// -- elements --
function el(tag, attributes = {}, ...children) {
  const made = Object.assign(document.createElement(tag), attributes);
  made.append(...children.filter((child) => child != null));
  return made;
}
const link = (href, text) => el("a", { href }, text);
const folded = (title, open, ...children) => el("details", { open }, el("summary", {}, title), ...children);
const form = (value, digits = 2) => value == null ? "" : value.toLocaleString("en", { maximumFractionDigits: digits });
const ratio = (value) => value == null ? "" : value.toPrecision(3);
const percent = (value) => value == null ? "" : `${(100 * value).toPrecision(value < 0.1 ? 2 : 3).replace(/\.0+$/, "")} %`;
const faster = (row) => row.speedup == null ? "" : `${row.screened ? "~" : ""}${ratio(row.speedup)}x`;
const interval = (row) => row.lower == null ? "" : row.screened ? "rough" : `${ratio(row.lower)} to ${ratio(row.upper)}`;
const words = (text) => (text ?? "").replaceAll("_", " ");
// a file's name differs at its end: a long one loses whole parts before it
const tail = (name) => name.length <= 40 ? name : "…" + (name.match(/(?<=[/_.-]).{1,36}$/)?.[0] ?? name.slice(-36));
const short = (id) => /^[0-9a-f]{17,}$/.test(id) ? id.slice(0, 8) + "…" : tail(id);
const page = (row) => `#c/${encodeURIComponent(row.id)}`;
const listed = (filters) => "#list?" + new URLSearchParams(filters);

// -- highlighted code: the library's tokens, not its HTML --
function paint(code, language, parent) {
  if (code.length > 200000) return parent.append(code);
  const walk = (node, into) => node.children.forEach((child) => {
    if (typeof child === "string") return into.append(child);
    const span = el("span", { className: (child.scope ?? "").split(".").map((part, i) => i ? part + "_".repeat(i) : "hljs-" + part).join(" ") });
    walk(child, span);
    into.append(span);
  });
  walk(hljs.highlight(code, { language, ignoreIllegals: true })._emitter.rootNode, parent);
}
function block(code) {
  const made = el("code", { className: "hljs" }), quote = (...parts) => el("span", { className: "hljs-string" }, ...parts);
  // native sources stand in long strings of a Python module
  code.split(/("""|''')([\s\S]*?)\1/).forEach((part, i, all) => {
    if (i % 3 === 0) paint(part, "python", made);
    if (i % 3 !== 2) return;
    if (!/[;{]/.test(part)) return made.append(quote(all[i - 1], part, all[i - 1]));
    made.append(quote(all[i - 1]));
    paint(part, "cpp", made);
    made.append(quote(all[i - 1]));
  });
  return el("pre", {}, made);
}

// -- list --
const text = (cell) => document.createTextNode(words(String(cell.getValue() ?? "").replaceAll("\t", ", ")));
const status = (value) => el("span", { className: value === "correct" ? "status correct" : "status" }, words(value));
const number = (digits) => (cell) => document.createTextNode(form(cell.getValue(), digits));
const anchor = (show) => (cell) => link(page(cell.getData()), show(cell.getValue()));
// names break after their separators
const broken = (name) => el("span", {}, ...name.split(/(?<=[/_])/).flatMap((part) => [part, el("wbr")]));
const named = (id) => broken(short(id));
const numeric = { sorter: "number", sorterParams: { alignEmptyValues: "bottom" }, hozAlign: "right", headerHozAlign: "right" };
const wide = (title, field, formatter, responsive, more) => ({ title, field, formatter, responsive, minWidth: 90, variableHeight: true, headerWordWrap: true, ...more });
const speeds = [
  wide("Speedup", "speedup", (cell) => document.createTextNode(faster(cell.getData())), 1, { ...numeric, minWidth: 97 }),
  wide("95 % interval", "lower", (cell) => document.createTextNode(interval(cell.getData())), 6, { ...numeric, minWidth: 125 }),
  wide("Time in own kernels", "share", (cell) => document.createTextNode(percent(cell.getValue())), 2, { ...numeric, minWidth: 105 }),
];
const drawn = (id, data, columns, more) => {
  const made = new Tabulator(`#${id}`, { data, columns, layout: "fitColumns", responsiveLayout: "hide", index: "i", placeholder: "Nothing fits these filters.", ...more });
  return new Promise((resolve) => made.on("tableBuilt", () => resolve(made)));
};
const tall = { maxHeight: "max(22rem, calc(100vh - 17rem))" };

async function showList(query) {
  const filters = $("filters");
  if (!table) {
    filters.parentElement.open = innerWidth > 700;
    for (const select of filters.querySelectorAll("select")) {
      const values = [...new Set(columns[select.name].values.flatMap((value) => value.split("\t")))].filter(Boolean);
      select.append(el("option", { value: "" }, "any"), ...values.map((value) => el("option", { value }, words(value))));
      select.parentElement.hidden = !values.length;
    }
    table = await drawn("table", about.rows, [
      { formatter: "rowSelection", headerSort: false, width: 36, minWidth: 36, responsive: 0, hozAlign: "center" },
      wide("Candidate", "id", anchor(named), 3, { minWidth: 100, maxWidth: 160 }),
      wide("Task", "task", anchor(broken), 0, { widthGrow: 2, minWidth: 110 }),
      wide("Model", "model", (cell) => broken(cell.getValue()), 3),
      wide("Status", "status", (cell) => status(cell.getValue()), 1, { minWidth: 104 }),
      wide("Reason", "reason", text, 4, { minWidth: 110 }),
      ...speeds,
      wide("Reasoning tokens", "tokens", number(0), 5, { ...numeric, minWidth: 95 }),
      ...(about.rows.some((row) => row.bottleneck) ? [
        wide("Limited by", "bottleneck", text, 6),
        wide("SOL score", "sol_score", number(2), 6, { ...numeric, minWidth: 80 }),
      ] : []),
      wide("Flags", "flags", text, 8, { widthGrow: 2, minWidth: 120 }),
      ...(about.rows.some((row) => row.strategies) ? [wide("Training sets", "strategies", text, 7, { minWidth: 110 })] : []),
    ], { height: tall.maxHeight, selectableRows: 2, selectableRowsRollingSelection: true });
    table.on("dataFiltered", (_, rows) => { $("count").textContent = `${form(rows.length)} of ${form(about.rows.length)} candidates`; });
    table.on("rowSelectionChanged", (rows) => { $("compare").disabled = rows.length !== 2; });
    $("compare").onclick = () => { location.hash = `#diff/${table.getSelectedData().map((row) => encodeURIComponent(row.id)).join("/")}`; };
    const said = () => { location.hash = "#list?" + new URLSearchParams([...new FormData(filters)].filter(([, value]) => value)); };
    filters.oninput = said;
    filters.onreset = () => setTimeout(said);
    filters.onsubmit = (event) => event.preventDefault();
  }
  const wanted = Object.fromEntries(new URLSearchParams(query));
  for (const field of filters.querySelectorAll("[name]")) if (field.value !== (wanted[field.name] ?? "")) field.value = wanted[field.name] ?? "";
  const among = ["set", "model", "status", "reason"].filter((name) => wanted[name]);
  const tagged = ["flags", "strategies"].filter((name) => wanted[name]);
  const task = (wanted.task ?? "").toLowerCase();
  table.setFilter((row) => among.every((name) => row[name] === wanted[name])
    && tagged.every((name) => row[name].split("\t").includes(wanted[name]))
    && (!wanted.speedup || row.speedup >= +wanted.speedup) && (!wanted.tokens || (row.tokens != null && row.tokens <= +wanted.tokens))
    && (!task || row.task.toLowerCase().includes(task)));
}

// -- head: how many there are, by status --
function counts(rows) {
  const tally = new Map();
  for (const row of rows) tally.set(row.status, (tally.get(row.status) ?? 0) + 1);
  const tasks = new Set(rows.map((row) => row.task)).size;
  return [
    `${form(rows.length)} candidates of ${form(tasks)} tasks `,
    ...[...tally].sort((one, other) => other[1] - one[1]).flatMap(([name, count]) => [el("a", { href: listed({ status: name }) }, status(name), ` ${form(count)}`), " "]),
  ];
}

// -- one candidate --
const CONFIRMING = "Confirming runs the whole protocol in a fresh process: all trials, the time by the judge's own clock on inputs that the kernel has not seen, checks after timing, and a sanitizer. A refresh confirms what its strategy takes; concur verify confirms one kernel.";
function sentence(row, told) {
  if (row.screened) return "Correct so far: it was only screened, and no check of a screening failed.";
  const reason = (about.reasons[row.reason] ?? words(row.reason)).replace(/\.$/, "").replace(/^[A-Z](?=[a-z]*[ ,])/, (first) => first.toLowerCase());
  const said = `${words(row.status)}: ${reason}`;
  return said.charAt(0).toUpperCase() + said.slice(1) + "." + (told.detail ? ` ${told.detail}` : "");
}
function timing(row, name, told, found) {
  const between = row.screened ? "a rough time, often too good" : `95 % interval ${ratio(found.speedup_lower)} to ${ratio(found.speedup_upper)}`;
  const ms = told.timing.candidate_ms, share = percent(told.custom_kernel_time_share) || "an unknown share";
  return `${name}: speedup ${row.screened ? "~" : ""}${ratio(found.speedup)} (own kernels take ${share} of the time; ${between}); reference ${form(found.reference_ms, 4)} ms, candidate ${form(ms, 4)} ms per call.`;
}
const facts = (value) => value && typeof value === "object"
  ? el("dl", {}, ...Object.entries(value).filter(([, inner]) => inner != null && inner !== "" && inner.length !== 0).flatMap(([name, inner]) => [el("dt", {}, words(name)), el("dd", {}, facts(inner))]))
  : typeof value === "number" ? form(value, 6) : String(value);
const found = (id) => about.rows[about.byId.get(decodeURIComponent(id))] ?? (() => { throw Error(`There is no candidate ${decodeURIComponent(id)} here.`); })();

async function showCandidate(id) {
  const row = found(id), told = await details(row.i);
  const { reasoning, answer, response, code, reference, log_tail: log, ...rest } = told;
  const others = about.rows.filter((other) => other.task === row.task && other !== row).slice(0, 500);
  const select = el("select", { onchange: () => { location.hash = `#diff/${encodeURIComponent(row.id)}/${select.value}`; } }, el("option", { value: "" }, "another answer to this task"),
    ...others.map((other) => el("option", { value: encodeURIComponent(other.id) }, `${short(other.id)} ${words(other.status)} ${faster(other)} ${other.model}`)));
  $("candidate").replaceChildren(
    el("h1", {}, link(listed({ task: row.task }), row.task)),
    el("p", { className: "note" }, `${row.model} · ${row.id}`, row.tokens == null ? null : ` · ${form(row.tokens)} reasoning tokens`,
      row.strategies ? ` · in ${row.strategies.replaceAll("\t", ", ")}` : null, row.flags ? ` · flags: ${words(row.flags.replaceAll("\t", ", "))}` : null),
    el("p", { className: `verdict ${row.status === "correct" ? "correct" : "wrong"}` }, sentence(row, told)),
    row.screened ? el("p", { className: "note" }, CONFIRMING) : "",
    ...(told.timing ? [el("p", {}, timing(row, "Against PyTorch eager", told, told.timing))] : []),
    ...(told.timing?.compiled?.speedup ? [el("p", {}, timing(row, "Against torch.compile", told, told.timing.compiled))] : []),
    el("p", {}, el("label", {}, "Compare with ", select)),
    el("div", { className: "sides" },
      el("div", {}, el("h2", {}, "Reference"), reference ? block(reference) : el("p", {}, "The task's program is not in this table: name the tasks with --tasks.")),
      el("div", {}, el("h2", {}, "Candidate"), code ? block(code) : el("p", {}, "The response contains no code."))),
    ...[["Log", log, row.status !== "correct"], ["Reasoning", reasoning, true], ["Answer", answer || (reasoning ? "" : response), !code]]
      .filter(([, body]) => body).map(([title, body, open]) => folded(`${title} (${form(body.length)} characters)`, open, el("pre", { className: "prose" }, body))),
    folded("All recorded fields", false, facts(rest)));
}

async function showDiff(...ids) {
  const rows = ids.map(found), codes = (await Promise.all(rows.map((row) => details(row.i)))).map((told) => told.code ?? "");
  const lines = Diff.diffLines(...codes).flatMap((part) => part.value.replace(/\n$/, "").split("\n").map((line) =>
    el("span", { className: part.added ? "added" : part.removed ? "removed" : "" }, `${part.added ? "+" : part.removed ? "-" : " "} ${line}\n`)));
  $("diff").replaceChildren(el("h1", {}, "Difference of two kernels"),
    ...rows.map((row, i) => el("p", {}, "-+"[i] + " ", link(page(row), short(row.id)), ` ${row.task}, ${row.model}: ${words(row.status)}`, row.speedup == null ? null : `, speedup ${faster(row)} (${interval(row)}; own kernels ${percent(row.share) || "unknown"})`)),
    el("pre", { className: "diff" }, ...lines));
}

// -- leaderboards --
async function showTasks() {
  if (taskTable) return;
  const best = new Map();
  for (const row of about.rows) {
    const entry = best.get(row.task) ?? { task: row.task, samples: 0, correct: 0, speedup: null };
    best.set(row.task, entry);
    entry.samples += 1;
    if (row.status !== "correct") continue;
    entry.correct += 1;
    if (row.speedup > (entry.speedup ?? 0)) Object.assign(entry, { speedup: row.speedup, screened: row.screened, lower: row.lower, upper: row.upper, share: row.share, id: row.id, model: row.model });
  }
  taskTable = await drawn("tasks-table", [...best.values()].map((entry, i) => ({ i, ...entry })), [
    wide("Task", "task", (cell) => link(listed({ task: cell.getValue() }), broken(cell.getValue())), 0, { widthGrow: 3, minWidth: 120 }),
    wide("Fastest", "id", (cell) => cell.getValue() ? anchor(named)(cell) : document.createTextNode("none correct"), 0, { minWidth: 100 }),
    wide("By", "model", (cell) => broken(cell.getValue() ?? ""), 2), ...speeds,
    wide("Correct", "correct", (cell) => document.createTextNode(`${cell.getValue()} of ${cell.getData().samples}`), 3, numeric),
  ], { ...tall, initialSort: [{ column: "speedup", dir: "desc" }] });
}
async function showModels() {
  if (modelTable) return;
  $("notes").replaceChildren(...about.notes.map((note) => el("p", {}, note)));
  const names = Object.keys(about.models[0] ?? {}).filter((name) => name !== "model" && about.models.some((model) => model[name]));
  modelTable = await drawn("models-table", about.models.map((model, i) => ({ i, ...model })), [
    wide("model", "model", (cell) => link(listed({ model: cell.getValue(), set: cell.getData().set }), cell.getValue()), 0, { minWidth: 160 }),
    // names such as "fast_1@1" hold dots: no field of them
    ...names.map((name, i) => wide(name, `f${i}`, (cell) => document.createTextNode(cell.getData()[name]), /[@ ]/.test(name) ? 1 : 2, { headerSort: false, minWidth: /[@ ]/.test(name) ? 175 : 80 })),
  ], { responsiveLayout: "collapse" });
}

// -- routes: #list?filters, #c/ID, #diff/ID/ID, #tasks, #models --
async function route() {
  const [view, ...rest] = (location.hash.slice(1) || "list").split(/[/?]/);
  const views = { list: showList, c: showCandidate, diff: showDiff, tasks: showTasks, models: showModels };
  try {
    $("message").hidden = true;
    const shown = view === "c" ? "candidate" : views[view] ? view : "list";
    for (const section of document.querySelectorAll("main > section")) section.hidden = section.id !== shown;
    for (const each of document.querySelectorAll("nav a")) each.classList.toggle("here", each.hash === "#" + shown);
    await (views[view] ?? showList)(...rest);
    if (shown !== "list") window.scrollTo(0, 0);
  } catch (error) { fail(error); }
}
index.then((data) => {
  const values = Object.entries(data.columns);
  columns = data.columns;
  about = data;
  about.rows = data.columns.id.map((id, i) => {
    const row = { i };
    for (const [name, column] of values) row[name] = column.rows ? column.values[column.rows[i]] : column[i];
    return row;
  });
  about.byId = new Map(about.rows.map((row) => [row.id, row.i]));
  document.title = `Candidates of ${data.title}`;
  $("title").textContent = data.title;
  $("counts").replaceChildren(...counts(about.rows));
  for (const each of document.querySelectorAll(".screened")) each.hidden = !about.rows.some((row) => row.screened);
  window.addEventListener("hashchange", route);
  return route();
}).catch(fail);
