"use strict";
// The page's own script: tabs, theme, charts from the figures in #data, and the timeline drawn from packed columns.
// plotly.js and the timelines are read when the first chart, or a timeline, is to be seen: the page is there at once.
(() => {
  const REPORT = JSON.parse(document.getElementById("data").textContent);

  function plotly() {
    if (!window.Plotly) {
      const script = document.createElement("script");
      script.textContent = byId("plotly").textContent;
      document.head.append(script);
    }
    return window.Plotly;
  }

  const PALETTES = { // Okabe-Ito, and the same hues lighter
    light: ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#b97d00"],
    dark: ["#56b4e9", "#ff9e5e", "#2fcf9f", "#e8a6cc", "#a9d8f7", "#f0c04a"],
  };
  const CONFIG = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"] };
  const MOST_ROWS = 60, MOST_RAN = 40, MOST_BARS = 1500;
  const root = document.documentElement;
  const byId = (id) => document.getElementById(id);
  const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const escape = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;");
  const colour = (place) => PALETTES[root.dataset.theme][place % 6];

  // ------------------------------------------------------------- charts

  function painted(figure) {
    const data = figure.data.map((trace) => {
      const made = { ...trace };
      if (trace.heat) made.colorscale = [[0, css("--raised")], [1, colour(0)]];
      if (trace.colour === undefined) return made;
      const own = colour(trace.colour);
      if (trace.type === "bar") made.marker = { ...trace.marker, color: own, ...hatched(trace, own) };
      else {
        made.line = { ...trace.line, color: own };
        made.marker = { ...trace.marker, color: own, line: { ...(trace.marker || {}).line, color: own } };
        made.fillcolor = own + "40";
      }
      return made;
    });
    return [data, framed(figure.layout)];
  }

  const hatched = (trace, own) => !trace.hatch ? {} : {
    color: css("--back"), line: { color: own, width: 1 },
    pattern: { shape: "/", fgcolor: own, bgcolor: css("--back"), size: 5, solidity: 0.45 },
  };

  function framed(layout) {
    const text = css("--text"), line = css("--line");
    const made = {
      margin: { l: 76, r: 14, t: 26, b: 46 }, legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom" }, ...layout,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: text, size: 12 },
      hoverlabel: { bgcolor: css("--raised"), bordercolor: line, font: { color: text }, align: "left" },
    };
    for (const key of Object.keys(layout).filter((name) => /^[xy]axis/.test(name))) {
      const exponents = layout[key].type === "log" ? { tickformat: "~g", minor: { ticks: "outside", dtick: "D1" } } : {};
      made[key] = { gridcolor: line, linecolor: line, zerolinecolor: line, automargin: true, ...exponents, ...layout[key] };
    }
    made.shapes = (layout.shapes || []).map((one) => ({ ...one, line: { ...one.line, color: css(one.tint || "--text") } }));
    return made;
  }

  function draw(element) {
    if (element.id === "gantt") { timeline.draw(); return; }
    const [data, layout] = painted(REPORT.figures[element.id]);
    plotly().react(element, data, layout, CONFIG);
    element.dataset.drawn = root.dataset.theme;
  }

  function drawIn(panel) {
    for (const element of panel.querySelectorAll(".plot")) {
      if (element.dataset.drawn !== root.dataset.theme) draw(element);
    }
  }

  // Keys on a chart that has the focus: + and - zoom, arrows move, 0 shows all.
  function onKey(event) {
    const step = { "+": [0.25, -0.25], "=": [0.25, -0.25], "-": [-0.5, 0.5], ArrowLeft: [-0.25, -0.25], ArrowRight: [0.25, 0.25] }[event.key];
    const element = event.currentTarget;
    if (event.ctrlKey || event.metaKey || event.altKey || (!step && event.key !== "0") || !element.layout) return;
    event.preventDefault();
    if (element.id === "gantt") { timeline.move(step || [-1, 1]); return; }
    if (!step) { draw(element); plotly().relayout(element, { "xaxis.autorange": true }); return; }
    const [from, to] = element.layout.xaxis.range, width = to - from;
    plotly().relayout(element, { "xaxis.range": [from + step[0] * width, to + step[1] * width] });
  }

  // ------------------------------------------------------------- tabs and theme

  const tabs = [...document.querySelectorAll("[role=tab]")];
  const panels = tabs.map((tab) => byId(tab.getAttribute("aria-controls")));

  function show(place, focus) {
    tabs.forEach((tab, other) => {
      tab.setAttribute("aria-selected", other === place);
      tab.tabIndex = other === place ? 0 : -1;
      panels[other].hidden = other !== place;
    });
    if (focus) tabs[place].focus();
    drawIn(panels[place]);
  }

  function choose(place, focus) {
    show(place, focus);
    history.replaceState(null, "", "#" + panels[place].id);
  }

  const chosen = () => tabs.findIndex((tab) => tab.getAttribute("aria-selected") === "true");
  const hashed = () => Math.max(0, panels.findIndex((panel) => "#" + panel.id === location.hash));

  function setTheme(theme) {
    root.dataset.theme = theme === "auto" ? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light") : theme;
  }

  // ------------------------------------------------------------- the timeline

  const KINDS = { f8: Float64Array, f4: Float32Array, i4: Int32Array, u1: Uint8Array };

  function unpacked(column) {
    const [kind, text] = Object.entries(column)[0];
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    return new KINDS[kind](bytes.buffer);
  }

  const columns = (table) => Object.fromEntries(Object.entries(table).map(([name, column]) => [name, unpacked(column)]));

  // One run's columns, with each request's segments and each segment's seconds left.
  function opened(raw) {
    const run = { ...raw, requests: columns(raw.requests), segments: columns(raw.segments), flags: columns(raw.flags),
      first: unpacked(raw.first_member), members: unpacked(raw.members) };
    const { start_s, end_s, batch } = run.segments;
    run.of = Array.from(run.requests.arrival_s, () => []);
    for (let row = 0; row < start_s.length; row++) for (const request of membersOf(run, batch[row])) run.of[request].push(row);
    run.left_s = new Float64Array(start_s.length);
    const left = new Map();
    for (let row = start_s.length - 1; row >= 0; row--) {
      run.left_s[row] = (left.get(batch[row]) || 0) + end_s[row] - start_s[row];
      left.set(batch[row], run.left_s[row]);
    }
    run.flagsOf = new Map();
    run.flags.batch.forEach((number, row) => run.flagsOf.set(number, [...(run.flagsOf.get(number) || []), row]));
    return run;
  }

  const membersOf = (run, batch) => run.members.subarray(run.first[batch], run.first[batch + 1]);
  const seconds = (value) => Math.abs(value) < 0.9995 ? `${(value * 1e3).toPrecision(3)} ms` : `${value.toPrecision(4)} s`;

  function named(run, request) {
    return `#${request} (${escape(REPORT.classes[run.requests.class[request]])}, ${run.requests.tokens[request]} tokens)`;
  }

  function pausedFor(run, row) {
    const { batch, end_s } = run.segments;
    const flag = (run.flagsOf.get(batch[row]) || []).find((one) => run.flags.stopped_s[one] >= end_s[row] - 1e-9);
    return flag === undefined ? "" : `<br>paused for ${named(run, run.flags.by[flag])}`;
  }

  function due(run, request, at_s, left_s) {
    const slo_s = run.requests.slo_s[request];
    if (!isFinite(slo_s)) return "<br>no SLO";
    const deadline_s = run.requests.arrival_s[request] + slo_s;
    const slack = left_s === undefined ? "" : `, slack ${(deadline_s - at_s - left_s - run.request_s).toFixed(3)} s as it began`;
    return `<br>deadline ${deadline_s.toFixed(3)} s${slack}`;
  }

  function toldOfSegment(run, row) {
    const { start_s, end_s, batch, first_op, last_op, instance, ended } = run.segments;
    const all = membersOf(run, batch[row]), head = all[0];
    if (head === undefined) return `<b>decodes, and no prompt</b><br>ran ${seconds(end_s[row] - start_s[row])} from ${start_s[row].toFixed(4)} s on instance ${instance[row]}`;
    const others = all.length > 1 ? `<br>batch of ${all.length}, with ${[...all].slice(1, 6).map((one) => "#" + one).join(", ")}${all.length > 6 ? ", …" : ""}` : "";
    const how = run.ended[ended[row]];
    return `<b>${named(run, head)}</b><br>ran ${seconds(end_s[row] - start_s[row])} from ${start_s[row].toFixed(4)} s on instance ${instance[row]}` +
      `<br>operators ${first_op[row]} to ${last_op[row]}, then ${how}${others}${due(run, head, start_s[row], run.left_s[row])}${how === "paused" ? pausedFor(run, row) : ""}`;
  }

  // The stretches of one request: [state, from, to, what to tell].
  function spells(run, request) {
    const { start_s, end_s, batch } = run.segments, found = [];
    let at_s = run.requests.arrival_s[request], before = -1;
    const gap = (to_s, row) => {
      const parked = before >= 0 && run.ended[run.segments.ended[before]] === "paused" && (row < 0 || batch[row] === batch[before]);
      const state = parked ? "suspended" : "waiting";
      found.push([state, at_s, to_s, `<b>${named(run, request)}</b><br>${state} ${seconds(to_s - at_s)}${parked ? pausedFor(run, before) : ""}${due(run, request)}`]);
    };
    for (const row of run.of[request]) {
      if (start_s[row] >= run.requests.first_token_s[request]) break; // computed again, after an eviction
      if (start_s[row] > at_s + 1e-9) gap(start_s[row], row);
      found.push(["running", start_s[row], end_s[row], toldOfSegment(run, row)]);
      at_s = end_s[row];
      before = row;
    }
    if (run.requests.decoded_s && run.requests.decoded_s[request] > run.requests.first_token_s[request]) {
      const [from_s, to_s] = [run.requests.first_token_s[request], run.requests.decoded_s[request]];
      found.push(["decoding", from_s, to_s, `<b>${named(run, request)}</b><br>decoded for ${seconds(to_s - from_s)}, until ${to_s.toFixed(3)} s`]);
    }
    const until_s = run.requests.first_token_s[request] > 0 ? 0 : run.requests.until_s[request];
    if (until_s > at_s + run.request_s + 1e-6) gap(until_s, -1);
    return found;
  }

  const timeline = {
    runs: [],
    place: 0,
    focus: null,
    window_s: null,

    run() {
      const run = (this.runs[this.place] ||= opened(JSON.parse(byId(`timeline-${this.place}`).textContent)));
      this.focus ??= run.focus;
      this.window_s ??= run.window_s;
      return run;
    },

    // The requests to show: where they are too many, those that ran longest, and those that waited longest.
    rows(run, from_s, to_s) {
      const { arrival_s, first_token_s, until_s } = run.requests, alive = [];
      for (let one = 0; one < arrival_s.length; one++) if (arrival_s[one] < to_s && until_s[one] > from_s) alive.push(one);
      const { start_s, end_s } = run.segments;
      const waited_s = (one) => one === this.focus ? Infinity : Math.min(first_token_s[one] || until_s[one], to_s) - Math.max(arrival_s[one], from_s);
      const ran_s = new Map(alive.map((one) => [one, run.of[one].reduce((sum, row) => sum + Math.max(0, Math.min(end_s[row], to_s) - Math.max(start_s[row], from_s)), 0)]));
      const ran = alive.filter((one) => ran_s.get(one) > 0).sort((a, b) => ran_s.get(b) - ran_s.get(a)).slice(0, MOST_RAN);
      const chosen = new Set(ran);
      for (const one of [...alive].sort((a, b) => waited_s(b) - waited_s(a))) if (chosen.size < MOST_ROWS) chosen.add(one);
      return [[...chosen].sort((a, b) => a - b), alive.length];
    },

    draw() {
      const run = this.run(), [from_s, to_s] = this.window_s;
      const [requests, alive] = this.rows(run, from_s, to_s);
      const place = new Map(requests.map((request, row) => [request, run.instances + row]));
      const bars = new Map(), floor_s = (to_s - from_s) / MOST_BARS;
      let hidden = 0;
      const bar = (state, kind, y, start_s, end_s, text) => {
        const key = state + kind;
        if (!bars.has(key)) {
          bars.set(key, { type: "bar", orientation: "h", base: [], x: [], y: [], hovertext: [], hoverinfo: "text", width: state === "decoding" ? 0.2 : 0.72,
            colour: kind < 0 ? undefined : kind, marker: { color: css("--soft") }, hatch: state === "suspended", opacity: state === "waiting" ? 0.28 : state === "decoding" ? 0.6 : 1, showlegend: state === "running",
            name: kind < 0 ? "decodes" : escape(REPORT.classes[kind]), legendgroup: String(kind) });
        }
        const one = bars.get(key);
        one.base.push(start_s); one.x.push(end_s - start_s); one.y.push(y); one.hovertext.push(text);
      };
      run.segments.start_s.forEach((start_s, row) => {
        const end_s = run.segments.end_s[row];
        if (start_s > to_s || end_s < from_s) return;
        if (end_s - start_s < floor_s / 3) { hidden += 1; return; }
        const head = membersOf(run, run.segments.batch[row])[0];
        bar("running", head === undefined ? -1 : run.requests.class[head], run.segments.instance[row], start_s, end_s, toldOfSegment(run, row));
      });
      for (const [request, y] of place) {
        for (const [state, start_s, end_s, text] of spells(run, request)) {
          if (start_s < to_s && end_s > from_s) bar(state, run.requests.class[request], y, start_s, end_s, text);
        }
      }
      const data = [...bars.values(), this.signals(run, place, from_s, to_s), ...this.marks(run, requests, place)];
      const ticks = [...Array(run.instances).keys()].map((one) => `GPU ${one}`)
        .concat(requests.map((one) => {
          const label = `#${one} ${escape(REPORT.classes[run.requests.class[one]])}`;
          return one === this.focus ? `<b>▸ ${label}</b>` : label;
        }));
      const layout = {
        height: 130 + 17 * ticks.length, barmode: "overlay", dragmode: "zoom", hovermode: "closest", margin: { l: 110, r: 14, t: 96, b: 12 },
        legend: { orientation: "h", x: 0, y: 1, yref: "container", yanchor: "top" },
        xaxis: { title: { text: "simulated time [s]" }, side: "top", range: [from_s, to_s] },
        yaxis: { tickvals: ticks.map((_, row) => row), ticktext: ticks, range: [ticks.length - 0.4, -0.6], fixedrange: true, zeroline: false, tickfont: { size: 11 } },
        shapes: [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: run.instances - 0.5, y1: run.instances - 0.5, line: { width: 1 }, tint: "--line" }],
      };
      this.note(run, requests.length, alive, hidden);
      const element = byId("gantt"), [painted_data, painted_layout] = painted({ data, layout });
      plotly().react(element, painted_data, painted_layout, { ...CONFIG, scrollZoom: true });
      element.dataset.drawn = root.dataset.theme;
      if (!this.listening) {
        this.listening = true;
        element.on("plotly_relayout", (change) => this.onRelayout(change));
        element.on("plotly_doubleclick", () => { this.move([-1, 1]); return false; });
      }
      byId("from").value = from_s.toFixed(3);
      byId("to").value = to_s.toFixed(3);
    },

    // Signals until their acknowledgement, below the bar of the request they are for.
    signals(run, place, from_s, to_s) {
      const { flagged_s, stopped_s, by, victim } = run.flags;
      const made = { type: "bar", orientation: "h", base: [], x: [], y: [], hovertext: [], hoverinfo: "text", width: 0.2, offset: 0.3,
        marker: { color: css("--text") }, name: "signal to acknowledgement" };
      flagged_s.forEach((at_s, row) => {
        if (at_s > to_s || stopped_s[row] < from_s || !place.has(by[row])) return;
        made.base.push(at_s); made.x.push(stopped_s[row] - at_s); made.y.push(place.get(by[row]));
        made.hovertext.push(`signal to stop ${named(run, victim[row])}<br>for ${named(run, by[row])}<br>acknowledged after ${seconds(stopped_s[row] - at_s)}`);
      });
      return made;
    },

    // Arrivals and deadlines.
    marks(run, requests, place) {
      const { arrival_s, slo_s } = run.requests, text = css("--text");
      const made = (name, symbol, size, x) => ({ type: "scatter", mode: "markers", name, x, y: requests.map((one) => place.get(one)), hoverinfo: "skip",
        marker: { symbol, size, color: text, line: { width: 1.5, color: text } } });
      return [
        made("arrival", "triangle-right-open", 7, requests.map((one) => arrival_s[one])),
        made("deadline", "line-ns-open", 11, requests.map((one) => isFinite(slo_s[one]) ? arrival_s[one] + slo_s[one] : null)),
      ];
    },

    note(run, shown, alive, hidden) {
      const notes = [];
      if (shown < alive) notes.push(`${shown} of the ${alive} requests of this window are shown, those that ran longest and those that waited longest`);
      if (hidden) notes.push(`${hidden} segments too short to be seen at this zoom are left out of the GPU rows`);
      if (run.span_s[0] > 0 || run.span_s[1] < run.end_s - 1e-6) {
        notes.push(`segments from ${run.span_s[0].toFixed(1)} s to ${run.span_s[1].toFixed(1)} s of ${run.end_s.toFixed(1)} s are in this page; report.window_s=[from,to] writes one with another part`);
      }
      byId("timeline-note").textContent = notes.length ? notes.join("; ") + "." : "";
    },

    show(from_s, to_s) {
      const width = Math.max(to_s - from_s, 1e-4);
      this.window_s = [from_s, from_s + width];
      this.draw();
    },

    move([left, right]) {
      const [from_s, to_s] = this.window_s, width = to_s - from_s;
      this.show(from_s + left * width, to_s + right * width);
    },

    onRelayout(change) {
      const range = change["xaxis.range"] || [change["xaxis.range[0]"], change["xaxis.range[1]"]];
      if (range[0] === undefined || (range[0] === this.window_s[0] && range[1] === this.window_s[1])) return;
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.show(range[0], range[1]), 120);
    },
  };

  // ------------------------------------------------------------- wiring

  tabs.forEach((tab, place) => {
    tab.addEventListener("click", () => choose(place, false));
    tab.addEventListener("keydown", (event) => {
      const to = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: tabs.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      choose((to + tabs.length) % tabs.length, true);
    });
  });
  document.querySelectorAll(".plot").forEach((element) => element.addEventListener("keydown", onKey));
  document.querySelectorAll("#window [data-move], #window [data-zoom]").forEach((button) => button.addEventListener("click", () => {
    const { move, zoom } = button.dataset;
    timeline.move(move ? [Number(move), Number(move)] : [(1 - zoom) / 2, (zoom - 1) / 2]);
  }));
  byId("window").addEventListener("submit", (event) => {
    event.preventDefault();
    const [from_s, to_s] = [Number(byId("from").value), Number(byId("to").value)];
    if (from_s < to_s) timeline.show(from_s, to_s);
    else byId("timeline-note").textContent = "The window must end after it begins.";
  });
  byId("run")?.addEventListener("change", (event) => { timeline.place = Number(event.target.value); timeline.focus = null; timeline.draw(); });
  document.querySelectorAll(".go").forEach((button) => button.addEventListener("click", () => {
    const { run, from, to, request } = button.dataset, width = Math.max(to - from, 1e-3);
    timeline.place = Number(run);
    timeline.focus = Number(request);
    timeline.window_s = [Math.max(0, from - 0.05 * width), Number(to) + 0.05 * width];
    if (byId("run")) byId("run").value = run;
    delete byId("gantt").dataset.drawn;
    choose(panels.findIndex((panel) => panel.id === "timeline"), true);
  }));
  byId("theme").addEventListener("change", (event) => { setTheme(event.target.value); drawIn(panels[chosen()]); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { setTheme(byId("theme").value); drawIn(panels[chosen()]); });
  byId("print").addEventListener("click", () => window.print());
  window.addEventListener("hashchange", () => show(hashed(), false));
  window.addEventListener("beforeprint", () => {
    root.dataset.theme = "light";
    panels.forEach((panel) => { panel.hidden = false; drawIn(panel); });
  });
  window.addEventListener("afterprint", () => { setTheme(byId("theme").value); show(chosen(), false); });

  setTheme("auto");
  show(hashed(), false);
  root.dataset.ready = "true";
})();
