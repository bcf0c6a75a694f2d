/* The sections of the page but for the curves. Each takes the data and returns elements, or null for nothing. */

// --- small parts -----------------------------------------------------------------------------------------------------

function text(value) {
  return make("bdi", {}, value);
}

function card(...children) {
  return make("div", { class: "card" }, children);
}

function scrolling(label, child) {
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, child);
}

function runHead(run, number) {
  return make("th", { scope: "col" }, swatch(number % 8, runDash(number), false), text(run.name));
}

/* Rows of [label, value of every run]; rows whose values are not all the same are marked where `mark` says so. */
function besideTable(label, runs, rows, mark) {
  const head = make("thead", {}, make("tr", {}, make("th", { scope: "col" }, ""), runs.map(runHead)));
  const body = make("tbody", {}, rows.map(([name, values]) => {
    const differs = mark && new Set(values.map(String)).size > 1;
    return make("tr", { class: differs ? "differs" : null }, make("th", { scope: "row" }, text(name)),
      values.map((value) => make("td", { class: "figure" }, value instanceof Node ? value : text(value))));
  }));
  return scrolling(label, make("table", { class: "beside" }, head, body));
}

/* Labels of all runs in their order, each with the value of every run or a dash. */
function joined(runs, rowsOf) {
  const labels = [];
  const tables = runs.map((run) => new Map(rowsOf(run)));
  for (const table of tables) {
    let place = 0;
    for (const label of table.keys()) {
      const known = labels.indexOf(label);
      if (known >= 0) place = known + 1;
      else labels.splice(place++, 0, label);
    }
  }
  return labels.map((label) => [label, tables.map((table) => (table.has(label) ? table.get(label) : "–"))]);
}

function factTable(rows) {
  return make(
    "table", { class: "facts" },
    make(
      "tbody", {},
      rows.map(
        ([label, value]) => make(
          "tr", {}, make("th", { scope: "row" }, label),
          make("td", { class: "figure" }, value instanceof Node ? value : text(value))
        )
      )
    )
  );
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

const perRun = (runs, show) => (
  runs.length === 1 ? show(runs[0], 0) : make(
    "div", { class: "columns" },
    runs.map(
      (run, number) => make(
        "div", {}, make("h3", { class: "runname" }, swatch(number % 8, runDash(number), false), " ", text(run.name)),
        show(run, number)
      )
    )
  )
);

// --- sections --------------------------------------------------------------------------------------------------------

function showTop({ apart, runs }) {
  const parts = [make("div", { class: "over" }, "Flatout report")];
  const chip = (run) => make("span", { class: "chip " + run.state.kind }, run.state.word);
  if (runs.length === 1) {
    parts.push(make("div", { class: "headline" }, make("h1", {}, text(runs[0].name)), chip(runs[0])));
    parts.push(make("p", { class: "summary" }, text(runs[0].summary)));
  } else {
    parts.push(make("h1", {}, runs.length + " runs side by side"));
    parts.push(
      make(
        "ul", { class: "runlist" },
        runs.map(
          (run, number) => make(
            "li", {}, swatch(number % 8, runDash(number), false), " ", make("strong", {}, text(run.name)), chip(run),
            make("span", { class: "soft" }, text(run.state.text))
          )
        )
      )
    );
  }
  const warnings = runs.flatMap(
    (run) => run.warnings.map((warning) => (runs.length === 1 ? warning : run.name + ": " + warning))
  );
  if (apart) warnings.unshift(apart[0].toUpperCase() + apart.slice(1) + ".");
  if (warnings.length) parts.push(
    make(
      "ul", { class: "warnings", "aria-label": "Warnings" }, warnings.map((warning) => make("li", {}, text(warning)))
    )
  );
  return parts;
}

function showFigures({ runs }) {
  if (runs.length === 1) {
    const count = runs[0].figures.length;
    const perRow = Math.max(4, Math.ceil(count / Math.ceil(count / 6)));
    return make(
      "dl", { class: "tiles by-" + perRow },
      runs[0].figures.map(
        (figure) => make(
          "div", { class: "tile", id: "figure-" + figure.key }, make("dt", {}, figure.label),
          make("dd", { class: "value" }, figure.text), make("dd", { class: "note" }, figure.note)
        )
      )
    );
  }
  const rows = joined(
    runs,
    (run) => run.figures.map(
      (figure) => [
        figure.label,
        make(
          "span", {}, make("strong", {}, figure.text),
          figure.note ? make("span", { class: "soft small" }, " " + figure.note) : null
        )
      ]
    )
  );
  return card(besideTable("Figures of all runs", runs, rows, false));
}

function showDifferences({ runs, differences }) {
  if (runs.length < 2) return null;
  if (!differences.length) return card(make("p", {}, "The configs are the same, value by value."));
  return card(make("p", { class: "soft" }, "Only what is not the same in all runs."),
    besideTable("Differences of the configs", runs, differences.map((row) => [row.path, row.values]), true));
}

function showFacts({ runs }) {
  if (runs.length === 1) {
    return make(
      "div", { class: "columns" },
      runs[0].facts.map((group) => card(make("h3", {}, group.group), factTable(group.rows)))
    );
  }
  const groups = [...new Set(runs.flatMap((run) => run.facts.map((fact) => fact.group)))];
  return groups.map(
    (name) => card(
      make("h3", {}, name),
      besideTable(
        name, runs, joined(runs, (run) => (run.facts.find((fact) => fact.group === name) || { rows: [] }).rows), true
      )
    )
  );
}

function showSwitches({ runs }) {
  const note = make("p", { class: "soft" }, "What was asked for, what really ran, and why it is something else. ",
    "A switch changes how fast a run is, never what it learns.");
  if (runs.length === 1) {
    const rows = runs[0].switches.map(
      ([name, asked, used, why]) => make(
        "tr", {}, make("th", { scope: "row", class: "code" }, text(name)), make("td", { class: "code" }, text(asked)),
        make("td", { class: "code" + (asked !== used ? " changed" : "") }, text(used)),
        make("td", { class: "why" }, why ? text(why) : null)
      )
    );
    const head = make("tr", {}, ["Switch", "Asked", "Used", "Why"].map((word) => make("th", { scope: "col" }, word)));
    return card(
      note, make("table", { class: "stack", id: "switch-table" }, make("thead", {}, head), make("tbody", {}, rows))
    );
  }
  const rows = joined(
    runs,
    (run) => run.switches.map(
      ([name, asked, used, why]) => [name, used + (asked === used ? "" : ", asked " + asked) + (why ? ": " + why : "")]
    )
  );
  return card(note, besideTable("Switches of all runs", runs, rows, true));
}

function showSpeed({ runs }) {
  const noted = ([label, value, note]) => [
    label, make("span", {}, value, note ? make("span", { class: "soft small" }, " " + note) : null)
  ];
  const groups = [...new Set(runs.flatMap((run) => run.speed.map((each) => each.group)))];
  const rowsOf = (run, name) => (run.speed.find((each) => each.group === name) || { rows: [] }).rows.map(noted);
  const cards = groups.map(
    (name) => card(
      make("h3", {}, name),
      runs.length === 1 ? factTable(rowsOf(runs[0], name)) : besideTable(
        name + " of all runs", runs, joined(runs, (run) => rowsOf(run, name)), false
      )
    )
  );
  const busy = runs.some(
    (run) => run.speed.some((each) => each.rows.some((row) => row[0] === "MFU" || row[0] === "GPU utilisation"))
  );
  const note = busy ? make(
    "p", { class: "help" },
    "GPU utilisation is the share of the time in which some kernel ran: below 90% the card waits for something. ",
    "How much it computes is MFU (model FLOP utilisation)."
  ) : null;
  return [runs.length === 1 ? make("div", { class: "columns" }, cards) : cards, note].flat();
}

function showTime({ runs }) {
  const bars = (run, number) => {
    if (!run.time.parts.length) return card(make("p", { class: "soft" }, "Nothing was timed yet."));
    const rows = run.time.parts.map(
      (part) => make(
        "tr", {}, make("th", { scope: "row" }, text(part.name)),
        make(
          "td", { class: "wide" },
          draw(
            "svg", { preserveAspectRatio: "none", viewBox: "0 0 100 14", "aria-hidden": "true" },
            draw("rect", { class: "back", width: 100, height: 14, rx: 0 }),
            draw(
              "rect",
              {
                class: "fill-" + (number % 8) + (part.beside ? " beside" : ""),
                width: Math.min(100, Math.max(0.3, 100 * part.share)), height: 14
              }
            )
          )
        ),
        make("td", { class: "number" }, (100 * part.share).toFixed(1) + "%"),
        make("td", { class: "number" }, part.text),
        make("td", { class: "number soft calls" }, part.calls ? part.calls.toLocaleString("en-US") + "×" : "")
      )
    );
    return card(make("table", { class: "bars" }, make("tbody", {}, rows)));
  };
  const notes = [...new Set(runs.map((run) => run.time.note))].filter(Boolean);
  return [perRun(runs, bars), ...notes.map((note) => make("p", { class: "help" }, note))];
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
  const head = (...words) => make(
    "thead", {},
    make("tr", {}, words.map(([word, kind]) => make("th", { scope: "col", class: kind || null }, word)))
  );
  const table = ({ eigenstates: part }, number) => {
    if (!part) return card(make("p", { class: "soft" }, "No eigenstate blocks."));
    const rows = part.layers.map(({ layer, bar: [least, low10, median, high90, most], ...row }) => make(
      "tr", {}, make("th", { scope: "row" }, layer),
      make(
        "td", { class: "wide" },
        draw(
          "svg", { preserveAspectRatio: "none", viewBox: "0 0 100 14", "aria-hidden": "true" },
          draw("rect", { class: "back", width: 100, height: 14 }),
          strip(least, most, "beside fill-" + (number % 8), 5, 4),
          strip(low10, high90, "fill-" + (number % 8), 2, 10),
          part.context ? upright("level", part.context) : null,
          ...(median === null ? [] : [upright("around", median), upright("median", median)])
        )
      ),
      make("td", { class: "number" }, make("strong", {}, row.median)), make("td", { class: "number" }, row.start),
      make("td", { class: "number calls" }, row.middle), make("td", { class: "number calls" }, row.longest),
      make("td", { class: "number calls" }, row.beyond), make("td", { class: "number calls" }, row.period),
      make("td", { class: "number soft calls" }, row.states)
    ));
    const names = head(
      ["Layer"], [""], ["median", "number"], ["at first", "number"], ["middle 80%", "number calls"],
      ["longest", "number calls"], ["beyond context", "number calls"], ["period", "number calls"],
      ["states", "number calls"]
    );
    return card(
      make("h3", {}, "Horizon by layer, tokens"), part.sentence ? make("p", { class: "soft" }, part.sentence) : null,
      scrolling("Memory horizon by layer", make("table", { class: "bars" }, names, make("tbody", {}, rows)))
    );
  };
  const notes = [...new Set(parts.map((part) => part.note))];
  return [perRun(runs, table), ...notes.map((note) => make("p", { class: "help" }, note))];
}

function showSamples({ runs }) {
  if (!runs.some((run) => run.samples.length)) return null;
  const one = ([step, prompt, body]) => make(
    "div", { class: "sample" }, make("h3", {}, "Step " + step.toLocaleString("en-US")),
    make(
      "pre", { tabindex: "0" }, make("span", { class: "prompt" }, prompt.trim() ? prompt : ""),
      make("span", { class: "text" }, body)
    )
  );
  return perRun(runs, (run) => {
    const [first, rest] = [run.samples.slice(0, 3), run.samples.slice(3)];
    const left = run.samples_left_out ? make(
      "p", { class: "soft small" }, run.samples_left_out.toLocaleString("en-US") + " more are in metrics.jsonl."
    ) : null;
    return make(
      "div", {}, first.map(one),
      rest.length ? make(
        "details", {}, make("summary", {}, "Earlier samples (" + rest.length + ")"), rest.map(one)
      ) : null,
      left
    );
  });
}

function showNotices({ runs }) {
  return perRun(runs, (run) => {
    if (!run.notices.length) return card(make("p", { class: "soft" }, "Nothing to tell."));
    const rows = run.notices.map(
      ([step, message, often]) => make(
        "tr", {}, make("td", { class: "figure soft" }, "step " + step.toLocaleString("en-US")),
        make(
          "td", {}, text(message),
          often > 1 ? make("span", { class: "soft" }, " (" + often.toLocaleString("en-US") + " times)") : null
        )
      )
    );
    const left = run.notices_left_out ? make(
      "p", { class: "soft small" }, run.notices_left_out + " between the first and the last ones are in metrics.jsonl."
    ) : null;
    return card(make("table", { class: "notices" }, make("tbody", {}, rows)), left);
  });
}

function showCheckpoints({ runs }) {
  return perRun(runs, (run) => {
    if (!run.checkpoints.length) return card(make("p", { class: "soft" }, "None was saved yet."));
    const head = make(
      "tr", {}, ["Step", "Size", "Saved in", "Folder", ""].map((word) => make("th", { scope: "col" }, word))
    );
    const rows = run.checkpoints.map(
      ([step, path, size, seconds, best, there]) => make(
        "tr", {}, make("td", { class: "figure" }, step.toLocaleString("en-US")), make("td", { class: "figure" }, size),
        make("td", { class: "figure" }, seconds), make("td", { class: "code" }, text(path)),
        make(
          "td", { class: "soft" }, [best ? "best then" : "", there ? "" : "removed since"].filter(Boolean).join(", ")
        )
      )
    );
    const left = run.checkpoints_left_out ? make(
      "p", { class: "soft small" }, run.checkpoints_left_out + " earlier ones are left out."
    ) : null;
    const table = (some) => scrolling(
      "Checkpoints",
      make("table", { class: "checkpoints" }, make("thead", {}, head.cloneNode(true)), make("tbody", {}, some))
    );
    const [first, rest] = [rows.slice(0, 6), rows.slice(6)];
    return card(
      table(first),
      rest.length ? make(
        "details", {}, make("summary", {}, "Earlier checkpoints (" + rest.length + ")"), table(rest)
      ) : null,
      left
    );
  });
}

function showEnvironment({ runs }) {
  const parts = runs.length === 1 ? [card(factTable(runs[0].environment))] : [
    card(besideTable("Environments", runs, joined(runs, (run) => run.environment), true))
  ];
  for (const run of runs.filter((each) => each.starts.length)) {
    const head = make(
      "tr", {},
      ["From step", "Went on from", "Flatout", "torch", "Device"].map((word) => make("th", { scope: "col" }, word))
    );
    const rows = run.starts.map(
      (start) => make("tr", {}, start.map((value) => make("td", { class: "figure" }, text(value))))
    );
    parts.push(card(make("h3", {}, "Starts", runs.length > 1 ? make("span", {}, " of ", text(run.name)) : null),
      scrolling("Starts", make("table", {}, make("thead", {}, head), make("tbody", {}, rows)))));
  }
  return parts;
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
      const link = make(
        "a",
        { download: "config.yaml", href: URL.createObjectURL(new Blob([run.config], { type: "application/yaml" })) }
      );
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    });
    return button;
  };
  return perRun(runs, (run) => card(
    make(
      "ul", { class: "commands" },
      run.commands.map(
        ([what, command]) => make(
          "li", {}, make("div", { class: "soft small" }, what),
          make("div", { class: "command" }, make("pre", {}, command), copyButton(command, "the command"))
        )
      )
    ),
    make(
      "p", { class: "soft small" },
      "What is written as auto is chosen anew on another machine; the table of switches tells what ran here."
    ),
    make(
      "details", { open: runs.length === 1 ? true : null },
      make("summary", {}, "The whole config" + (different.size ? ", differences marked" : "")), config(run)
    ),
    make("div", { class: "tools" }, copyButton(run.config, "the config"), save(run))));
}
