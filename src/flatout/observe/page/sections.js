/* The sections of the page but for the curves. Each takes the data and returns elements, or null for nothing. */

// --- small parts -----------------------------------------------------------------------------------------------------

const text = (value) => make("bdi", {}, value);
const card = (...children) => make("div", { class: "card" }, children);
const soft = (...children) => make("p", { class: "soft" }, children);
const help = (...children) => make("p", { class: "help" }, children);
const counted = (value) => value.toLocaleString("en-US");
const shownValue = (value) => (value instanceof Node ? value : text(value));

/* A text with a note behind it. */
function noted(value, note, tag = "span") {
  return make("span", {}, tag === "span" ? value : make(tag, {}, value),
    note ? make("span", { class: "soft small" }, " " + note) : null);
}

function scrolling(label, child) {
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, child);
}

/* A cell of a table: its class and what is in it, or what is in it alone. */
function cell(value) {
  const [kind, ...children] = Array.isArray(value) ? value : [null, value];
  return make("td", { class: kind }, children);
}

/* A table from words of its head, which may be missing, and rows of cells; an element is a cell as it is. */
function table(kind, head, rows, attributes) {
  const cellOf = (value) => (value instanceof Node && ["td", "th", "TD", "TH"].includes(value.tagName || value.tag)
    ? value : cell(value));
  const heading = (word) => make("th", Array.isArray(word) ? { scope: "col", class: word[1] } : { scope: "col" },
    Array.isArray(word) ? word[0] : word);
  return make("table", { class: kind, ...attributes },
    head ? make("thead", {}, make("tr", {}, head.map(heading))) : null,
    make("tbody", {}, rows.map((row) => make("tr", {}, row.map(cellOf)))));
}

function rowHead(value, kind) {
  return make("th", { scope: "row", class: kind || null }, value);
}

function runHead(run, number) {
  return make("th", { scope: "col" }, swatch(number % 8, runDash(number), false), text(run.name));
}

/* Rows of [label, value of every run]; rows whose values are not all the same are marked where `mark` says so. */
function besideTable(label, runs, rows, mark) {
  const head = make("thead", {}, make("tr", {}, make("th", { scope: "col" }, ""), runs.map(runHead)));
  const body = make("tbody", {}, rows.map(([name, values]) => {
    const differs = mark && new Set(values.map(String)).size > 1;
    return make("tr", { class: differs ? "differs" : null }, rowHead(text(name)),
      values.map((value) => cell(["figure", shownValue(value)])));
  }));
  return scrolling(label, make("table", { class: "beside" }, head, body));
}

/* Labels of all runs in their order, each with the value of every run or a dash. */
function joined(runs, rowsOf) {
  const labels = [];
  const tables = runs.map((run) => new Map(rowsOf(run)));
  for (const each of tables) {
    let place = 0;
    for (const label of each.keys()) {
      const known = labels.indexOf(label);
      if (known >= 0) place = known + 1;
      else labels.splice(place++, 0, label);
    }
  }
  return labels.map((label) => [label, tables.map((each) => (each.has(label) ? each.get(label) : "–"))]);
}

function factTable(rows) {
  return table("facts", null, rows.map(([label, value]) => [rowHead(label), ["figure", shownValue(value)]]));
}

/* Groups of rows: of one run as columns of cards, of several as a card for each group with a column for each run. */
function groupCards(runs, groupsOf, rowsOf, title, mark) {
  const names = [...new Set(runs.flatMap((run) => groupsOf(run).map((each) => each.group)))];
  const rows = (run, name) => rowsOf((groupsOf(run).find((each) => each.group === name) || { rows: [] }).rows);
  const cards = names.map((name) => card(make("h3", {}, name), runs.length === 1
    ? factTable(rows(runs[0], name))
    : besideTable(title(name), runs, joined(runs, (run) => rows(run, name)), mark)));
  return runs.length === 1 ? [make("div", { class: "columns" }, cards)] : cards;
}

function leftOut(count, words) {
  return count ? make("p", { class: "soft small" }, words) : null;
}

function folded(label, count, children) {
  return count ? make("details", {}, make("summary", {}, label + " (" + count + ")"), children) : null;
}

function copyButton(value, what) {
  const button = make("button", { type: "button", "aria-label": "Copy " + what }, "Copy");
  button.addEventListener("click", async () => {
    let done = false;
    try {
      await navigator.clipboard.writeText(value);
      done = true;
    } catch {
      const area = make("textarea", { readonly: true, class: "skip" });
      area.value = value;
      document.body.append(area);
      area.select();
      done = document.execCommand("copy");
      area.remove();
    }
    button.textContent = done ? "Copied" : "Select it";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}

function perRun(runs, show) {
  if (runs.length === 1) return show(runs[0], 0);
  const head = (run, number) => make("h3", { class: "runname" }, swatch(number % 8, runDash(number), false), " ",
    text(run.name));
  return make("div", { class: "columns" },
    runs.map((run, number) => make("div", {}, head(run, number), show(run, number))));
}

/* A bar of 100 by 14 in a table; `parts` are drawn on its background. */
function bar(background, ...parts) {
  return ["wide", draw("svg", { preserveAspectRatio: "none", viewBox: "0 0 100 14", "aria-hidden": "true" },
    draw("rect", { class: "back", width: 100, height: 14, ...background }), parts)];
}

// --- sections --------------------------------------------------------------------------------------------------------

function showTop({ apart, runs }) {
  const parts = [make("div", { class: "over" }, "Flatout report")];
  const chip = (run) => make("span", { class: "chip " + run.state.kind }, run.state.word);
  if (runs.length === 1) {
    parts.push(make("div", { class: "headline" }, make("h1", {}, text(runs[0].name)), chip(runs[0])));
    parts.push(make("p", { class: "summary" }, text(runs[0].summary)));
  } else {
    parts.push(make("h1", {}, runs.length + " runs side by side"));
    parts.push(make("ul", { class: "runlist" }, runs.map((run, number) => make("li", {},
      swatch(number % 8, runDash(number), false), " ", make("strong", {}, text(run.name)), chip(run),
      make("span", { class: "soft" }, text(run.state.text))))));
  }
  const warnings = runs.flatMap(
    (run) => run.warnings.map((warning) => (runs.length === 1 ? warning : run.name + ": " + warning))
  );
  if (apart) warnings.unshift(apart[0].toUpperCase() + apart.slice(1) + ".");
  if (warnings.length) parts.push(make("ul", { class: "warnings", "aria-label": "Warnings" },
    warnings.map((warning) => make("li", {}, text(warning)))));
  return parts;
}

function showFigures({ runs }) {
  if (runs.length > 1) {
    const rowsOf = (run) => run.figures.map((figure) => [figure.label, noted(figure.text, figure.note, "strong")]);
    return card(besideTable("Figures of all runs", runs, joined(runs, rowsOf), false));
  }
  const count = runs[0].figures.length;
  const perRow = Math.max(4, Math.ceil(count / Math.ceil(count / 6)));
  return make("dl", { class: "tiles by-" + perRow }, runs[0].figures.map((figure) => make(
    "div", { class: "tile", id: "figure-" + figure.key }, make("dt", {}, figure.label),
    make("dd", { class: "value" }, figure.text), make("dd", { class: "note" }, figure.note)
  )));
}

function showDifferences({ runs, differences }) {
  if (runs.length < 2) return null;
  if (!differences.length) return card(make("p", {}, "The configs are the same, value by value."));
  return card(soft("Only what is not the same in all runs."),
    besideTable("Differences of the configs", runs, differences.map((row) => [row.path, row.values]), true));
}

function showFacts({ runs }) {
  const parts = groupCards(runs, (run) => run.facts, (rows) => rows, (name) => name, true);
  return runs.length === 1 ? parts[0] : parts;
}

function showSwitches({ runs }) {
  const note = soft("What was asked for, what really ran, and why it is something else. ",
    "A switch changes how fast a run is, never what it learns.");
  if (runs.length === 1) {
    const rows = runs[0].switches.map(([name, asked, used, why]) => [
      rowHead(text(name), "code"), ["code", text(asked)], ["code" + (asked !== used ? " changed" : ""), text(used)],
      ["why", why ? text(why) : null]
    ]);
    return card(note, table("stack", ["Switch", "Asked", "Used", "Why"], rows, { id: "switch-table" }));
  }
  const rowsOf = (run) => run.switches.map(
    ([name, asked, used, why]) => [name, used + (asked === used ? "" : ", asked " + asked) + (why ? ": " + why : "")]
  );
  return card(note, besideTable("Switches of all runs", runs, joined(runs, rowsOf), true));
}

function showSpeed({ runs }) {
  const rowsOf = (rows) => rows.map(([label, value, note]) => [label, noted(value, note)]);
  const cards = groupCards(runs, (run) => run.speed, rowsOf, (name) => name + " of all runs", false);
  const busy = runs.some(
    (run) => run.speed.some((each) => each.rows.some((row) => row[0] === "MFU" || row[0] === "GPU utilisation"))
  );
  const note = busy ? help(
    "GPU utilisation is the share of the time in which some kernel ran: below 90% the card waits for something. ",
    "How much it computes is MFU (model FLOP utilisation)."
  ) : null;
  return [...cards, note];
}

function showTasks({ runs }) {
  const rowsOf = (run) => run.tasks.map(([label, value, note]) => [label, noted(value, note)]);
  if (!runs.some((run) => run.tasks.length)) return null;
  const rows = runs.length === 1 ? factTable(rowsOf(runs[0]))
    : besideTable("Tasks of all runs", runs, joined(runs, rowsOf), false);
  return card(soft("Scores with one standard error."), rows);
}

function showTime({ runs }) {
  const bars = (run, number) => {
    if (!run.time.parts.length) return card(soft("Nothing was timed yet."));
    return card(table("bars", null, run.time.parts.map((part) => [
      rowHead(text(part.name)),
      bar({ rx: 0 }, draw("rect", {
        class: "fill-" + (number % 8) + (part.beside ? " beside" : ""),
        width: Math.min(100, Math.max(0.3, 100 * part.share)), height: 14
      })),
      ["number", (100 * part.share).toFixed(1) + "%"], ["number", part.text],
      ["number soft calls", part.calls ? counted(part.calls) + "×" : ""]
    ])));
  };
  const notes = [...new Set(runs.map((run) => run.time.note))].filter(Boolean);
  return [perRun(runs, bars), ...notes.map((note) => help(note))];
}

/* Horizons as bars on one logarithmic scale, a row for each layer. */
function showEigenstates({ runs }) {
  const parts = runs.map((run) => run.eigenstates).filter(Boolean);
  if (!parts.length) return null;
  const seen = parts.flatMap((part) => [part.context, ...part.layers.flatMap((row) => row.bar)]);
  const usable = seen.filter((value) => value > 0 && value < 1e29);
  const [low, high] = usable.length ? [Math.min(...usable), Math.max(...usable)] : [1, 2];
  const at = (value) => Math.min(100, Math.max(0, 100 * Math.log(value / low) / Math.log(high / low || 2) || 0));
  const strip = (from, to, kind, top, tall) => from === null || to === null ? null : draw(
    "rect", { class: kind, x: at(from), width: Math.max(0.5, at(to) - at(from)), y: top, height: tall }
  );
  const upright = (kind, value) => draw("line", { class: kind, x1: at(value), x2: at(value), y1: 0, y2: 14 });
  const words = ["at first", "middle 80%", "longest", "beyond context", "period", "states"];
  const names = ["Layer", "", ["median", "number"],
    ...words.map((word, place) => [word, place ? "number calls" : "number"])];
  const layers = ({ eigenstates: part }, number) => {
    if (!part) return card(soft("No eigenstate blocks."));
    const rows = part.layers.map(({ layer, bar: [least, low10, median, high90, most], ...row }) => [
      rowHead(layer),
      bar({}, strip(least, most, "beside fill-" + (number % 8), 5, 4),
        strip(low10, high90, "fill-" + (number % 8), 2, 10), part.context ? upright("level", part.context) : null,
        ...(median === null ? [] : [upright("around", median), upright("median", median)])),
      ["number", make("strong", {}, row.median)], ["number", row.start],
      ...[row.middle, row.longest, row.beyond, row.period].map((value) => ["number calls", value]),
      ["number soft calls", row.states]
    ]);
    return card(make("h3", {}, "Horizon by layer, tokens"), part.sentence ? soft(part.sentence) : null,
      scrolling("Memory horizon by layer", table("bars", names, rows)));
  };
  const notes = [...new Set(parts.map((part) => part.note))];
  return [perRun(runs, layers), ...notes.map((note) => help(note))];
}

function showSamples({ runs }) {
  if (!runs.some((run) => run.samples.length)) return null;
  const one = ([step, prompt, body]) => make("div", { class: "sample" }, make("h3", {}, "Step " + counted(step)),
    make("pre", { tabindex: "0" }, make("span", { class: "prompt" }, prompt.trim() ? prompt : ""),
      make("span", { class: "text" }, body)));
  return perRun(runs, ({ samples, samples_left_out: left }) => make("div", {}, samples.slice(0, 3).map(one),
    folded("Earlier samples", samples.slice(3).length, samples.slice(3).map(one)),
    leftOut(left, counted(left) + " earlier ones are in metrics.jsonl.")));
}

function showNotices({ runs }) {
  return perRun(runs, (run) => {
    if (!run.notices.length) return card(soft("There are none."));
    const rows = run.notices.map(([step, message, often]) => [
      ["figure soft", "step " + counted(step)],
      [null, text(message), often > 1 ? make("span", { class: "soft" }, " (" + counted(often) + " times)") : null]
    ]);
    return card(table("notices", null, rows), leftOut(run.notices_left_out,
      run.notices_left_out + " earlier ones are in metrics.jsonl."));
  });
}

function showCheckpoints({ runs }) {
  return perRun(runs, (run) => {
    if (!run.checkpoints.length) return card(soft("None was saved yet."));
    const rows = run.checkpoints.map(([step, path, size, seconds, best, there]) => [
      ["figure", counted(step)], ["figure", size], ["figure", seconds], ["code", text(path)],
      ["soft", [best ? "best then" : "", there ? "" : "removed since"].filter(Boolean).join(", ")]
    ]);
    const some = (part) => scrolling("Checkpoints",
      table("checkpoints", ["Step", "Size", "Saved in", "Folder", ""], part));
    return card(some(rows.slice(0, 6)), folded("Earlier checkpoints", rows.slice(6).length, some(rows.slice(6))),
      leftOut(run.checkpoints_left_out, run.checkpoints_left_out + " earlier ones are left out."));
  });
}

function showEnvironment({ runs }) {
  return card(runs.length === 1 ? factTable(runs[0].environment)
    : besideTable("Environments", runs, joined(runs, (run) => run.environment), true));
}

function showReproduce({ runs, differences }) {
  const different = new Set(differences.map((row) => row.path));
  const config = (run) => {
    const box = make("pre", { class: "config", tabindex: "0" });
    let section = "";
    for (const line of run.config.split("\n")) {
      const name = line.trimStart().split(":", 1)[0];
      if (line && !line.startsWith(" ")) section = name;
      const path = line.startsWith(" ") ? section + "." + name : name;
      box.append(different.has(path) ? make("mark", {}, line) : line, "\n");
    }
    return box;
  };
  const save = (run) => {
    const button = make("button", { type: "button" }, "Save as config.yaml");
    button.addEventListener("click", () => {
      const href = URL.createObjectURL(new Blob([run.config], { type: "application/yaml" }));
      make("a", { download: "config.yaml", href }).click();
      setTimeout(() => URL.revokeObjectURL(href), 1000);
    });
    return button;
  };
  return perRun(runs, (run) => card(
    make("p", { class: "soft small" },
      `flatout ${/^chat:\n  source: (?!null)/m.test(run.config) ? "finetune" : "train"} CONFIG trains it again. What is written as auto is chosen anew on another machine.`),
    make("details", { open: runs.length === 1 ? true : null },
      make("summary", {}, "The whole config" + (different.size ? ", differences marked" : "")), config(run)),
    make("div", { class: "tools" }, copyButton(run.config, "the config"), save(run))));
}
