"use strict";
// The page's script: it draws the map and the timeline, and follows one stream of events. The service renders and
// escapes all texts; this script puts texts into the page as text, and parts as the service has rendered them.
(() => {
  const $ = (id) => document.getElementById(id);
  const STATES = ["open", "success", "running", "waiting", "failed"];
  const NAMES = ["open", "success", "running", "wait for a retry", "failed"];
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  // ---------------------------------------------------------------- numbers

  const whole = (number) => number.toLocaleString("en-US");
  function duration(seconds) {
    if (seconds < 0) return "";
    if (seconds < 10) return `${seconds.toFixed(1)} s`;
    const all = Math.round(seconds);
    if (all < 100) return `${all} s`;
    const two = (n) => String(n).padStart(2, "0");
    if (all < 3600) return `${Math.floor(all / 60)} min ${two(all % 60)} s`;
    if (all < 172800) return `${Math.floor(all / 3600)} h ${two(Math.floor((all % 3600) / 60))} min`;
    return `${Math.floor(all / 86400)} days`;
  }
  function ages() {
    for (const one of document.querySelectorAll("time[data-since]")) {
      const at = Date.parse(one.dateTime);
      if (at) {
        one.title = one.title || one.textContent;
        one.textContent = duration(Math.max(0, (Date.now() - at) / 1000)).replace(/^(\d+)\.\d s$/, "$1 s");
      }
    }
  }

  // ------------------------------------------------------------------- parts

  function replace(name, html) {
    const place = $(`part-${name}`);
    if (!place) return;
    const made = new DOMParser().parseFromString(html, "text/html").body;
    const open = new Map([...place.querySelectorAll("details[id]")].map((one) => [one.id, one.open]));
    const typed = new Map([...place.querySelectorAll("form[action]")].map((form) => [form.getAttribute("action") + (form.elements.executor ? form.elements.executor.value : ""), values(form)]));
    const focus = place.contains(document.activeElement) ? path(document.activeElement) : null;
    place.replaceChildren(...made.childNodes);
    for (const one of place.querySelectorAll("details[id]")) if (open.has(one.id)) one.open = open.get(one.id);
    for (const form of place.querySelectorAll("form[action]")) {
      restore(form, typed.get(form.getAttribute("action") + (form.elements.executor ? form.elements.executor.value : "")));
      preview(form);
    }
    if (focus) { const same = place.querySelector(focus); if (same) same.focus({ preventScroll: true }); }
    ages();
  }
  function values(form) {
    return [...form.elements].filter((one) => one.name && one.type !== "hidden").map((one) => [one.name, one.type === "checkbox" ? one.checked : one.value]);
  }
  function restore(form, given) {
    for (const [name, value] of given || []) {
      const one = form.elements[name];
      if (one && one.type === "checkbox") one.checked = value; else if (one) one.value = value;
    }
  }
  function path(element) {
    if (element.id) return `#${CSS.escape(element.id)}`;
    if (element.href) return `a[href="${CSS.escape(element.getAttribute("href"))}"]`;
    const form = element.closest("form[action]");
    if (!form) return null;
    const own = element.name ? `[name="${CSS.escape(element.name)}"]` : element.tagName.toLowerCase();
    return `form[action="${CSS.escape(form.getAttribute("action"))}"] ${own}`;
  }

  // ------------------------------------------------------------------- forms

  const quoted = (text) => (/^[A-Za-z0-9_@%+=:,.\/-]+$/.test(text) ? text : `'${text.replace(/'/g, `'"'"'`)}'`);
  function preview(form) {
    const code = form.querySelector("code.command");
    if (!code || !form.dataset.command) return;
    const words = [form.dataset.command];
    for (const one of form.elements) {
      if (one.name === "arg") { if (one.value.trim() && one.value.trim() !== "{}") words.push("--arg", quoted(compact(one.value))); }
      else if (one.dataset.choice !== undefined) { const chosen = one.selectedOptions[0]; if (chosen && chosen.dataset.words) words.push(chosen.dataset.words); }
      else if (one.dataset.flag && one.type === "checkbox") { if (one.checked) words.push(one.dataset.flag); }
      else if (one.dataset.flag && one.value.trim()) words.push(one.dataset.flag, quoted(one.value.trim()));
    }
    code.textContent = words.join(" ");
  }
  function compact(text) { try { return JSON.stringify(JSON.parse(text)); } catch { return text; } }
  document.addEventListener("input", (event) => { const form = event.target.closest("form"); if (form) preview(form); });
  document.addEventListener("change", (event) => { if (event.target.dataset.submit !== undefined) event.target.form.requestSubmit(); });
  document.addEventListener("submit", (event) => {
    const question = event.target.dataset.confirm;
    if (question && !window.confirm(question)) event.preventDefault();
  });

  // ----------------------------------------------------------- start an operation

  function startForm(form) {
    const arg = $("arg"), problem = $("problem"), fields = [...form.querySelectorAll("[data-field]")];
    let checking = 0, due = 0;
    const parsed = () => { try { const found = JSON.parse(arg.value || "{}"); return found && typeof found === "object" && !Array.isArray(found) ? found : null; } catch { return null; } };
    function toFields() {
      const found = parsed();
      if (!found) return;
      for (const one of fields) {
        const value = found[one.dataset.field];
        if (one === document.activeElement) continue;
        one.value = value === undefined ? "" : one.dataset.kind === "json" ? JSON.stringify(value) : String(value);
      }
    }
    function toJson(one) {
      const found = parsed();
      if (!found) { problem.textContent = "Correct the JSON first: the fields cannot be added to it."; return; }
      const text = one.value, name = one.dataset.field;
      if (text === "") delete found[name];
      else if (one.dataset.kind === "number") found[name] = Number(text);
      else if (one.dataset.kind === "boolean") found[name] = text === "true";
      else if (one.dataset.kind === "json") { try { found[name] = JSON.parse(text); } catch { problem.className = "problem"; problem.textContent = `${name} is not valid JSON yet`; return; } }
      else found[name] = text;
      arg.value = JSON.stringify(found, null, 2);
      preview(form);
      check();
    }
    function check() {
      clearTimeout(due);
      due = setTimeout(async () => {
        const mine = ++checking;
        const body = new URLSearchParams({ form_key: form.elements.form_key.value, type: form.elements.type.value, arg: arg.value });
        try {
          const answer = await fetch("/check", { method: "POST", body });
          const found = await answer.json();
          if (mine !== checking) return;
          problem.textContent = answer.ok ? found.problem || "The argument fits the schema." : found.error.message;
          problem.className = answer.ok && !found.problem ? "problem fits" : "problem";
        } catch { if (mine === checking) { problem.className = "problem"; problem.textContent = "The service does not answer."; } }
      }, 150);
    }
    for (const one of fields) one.addEventListener("input", () => toJson(one));
    arg.addEventListener("input", () => { toFields(); check(); });
    toFields();
    preview(form);
    if (arg.value.trim() !== "{}") check();
  }

  // --------------------------------------------------------------------- map

  const map = { cells: [], count: 0, per: 1, complete: false, mode: "state", at: -1, side: 12, columns: 1, listed: "" };
  window.distopMap = map; // for tests and for people with a console

  function addCells(found) {
    if (found.cells !== map.cells.length || found.count !== map.count) {
      map.cells = Array.from({ length: found.cells }, () => null);
      map.count = found.count;
      map.per = found.per;
    }
    for (const cell of found.changed) map.cells[cell[0]] = cell;
    map.complete = found.complete;
    drawMap();
  }
  function fit(canvas, height) {
    const width = canvas.parentElement.clientWidth, scale = window.devicePixelRatio || 1;
    canvas.width = Math.max(1, Math.round(width * scale));
    canvas.height = Math.max(1, Math.round(height * scale));
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    return [pen, width];
  }
  // Cividis: even for people who do not see red and green as different.
  const SCALE = [[0, 32, 77], [60, 77, 110], [124, 123, 120], [187, 174, 111], [255, 234, 70]];
  function shade(part) {
    const at = Math.min(1, Math.max(0, part)) * (SCALE.length - 1), low = Math.min(SCALE.length - 2, Math.floor(at)), rest = at - low;
    return `rgb(${SCALE[low].map((one, n) => Math.round(one + (SCALE[low + 1][n] - one) * rest)).join(",")})`;
  }
  const MEASURES = { duration: [6, duration], rows: [7, whole], attempts: [8, whole] };
  function drawMap() {
    const canvas = $("map-canvas");
    if (!canvas) return;
    const number = map.cells.length;
    const room = canvas.parentElement.clientWidth;
    map.side = number <= 100 ? 26 : number <= 400 ? 20 : number <= 1200 ? 14 : 12;
    map.columns = Math.max(1, Math.min(number || 1, Math.floor(room / map.side)));
    const [pen] = fit(canvas, Math.max(map.side, Math.ceil(number / map.columns) * map.side));
    const colours = STATES.map((name) => colour(`c-${name}`)), mark = colour("c-mark"), empty = colour("c-open");
    let low = Infinity, high = -Infinity;
    const measure = MEASURES[map.mode];
    if (measure) for (const cell of map.cells) if (cell && cell[measure[0]] >= 0) { low = Math.min(low, cell[measure[0]]); high = Math.max(high, cell[measure[0]]); }
    const log = (value) => Math.log1p(Math.max(0, value) * 1000);
    const gap = map.side >= 20 ? 2 : 1;
    map.cells.forEach((cell, n) => {
      const x = (n % map.columns) * map.side, y = Math.floor(n / map.columns) * map.side, size = map.side - gap;
      pen.fillStyle = empty;
      pen.fillRect(x, y, size, size);
      if (!cell) return;
      if (measure) {
        const value = cell[measure[0]];
        if (value < 0 || (map.mode === "attempts" && value === 0)) return;
        pen.fillStyle = shade(high > low ? (log(value) - log(low)) / (log(high) - log(low)) : 0.5);
        pen.fillRect(x, y, size, size);
        return;
      }
      paintState(pen, cell, x, y, size, colours, mark);
    });
    if (map.at >= 0 && map.at < number) {
      pen.strokeStyle = colour("ink");
      pen.lineWidth = 2;
      pen.strokeRect((map.at % map.columns) * map.side, Math.floor(map.at / map.columns) * map.side, map.side - gap, map.side - gap);
    }
    canvas.dataset.drawn = String(map.cells.filter(Boolean).length);
    for (const [name, holds] of [["map-first", map.complete || map.cells.some((cell) => cell && cell[1] < cell[1] + cell[2] + cell[3] + cell[4] + cell[5])], ["map-complete", map.complete]]) {
      if (holds && !performance.getEntriesByName(name).length) performance.mark(name);
    }
    canvas.dataset.complete = String(map.complete);
    const size = $("map-size");
    size.textContent = map.count ? `${whole(map.count)} partitions${map.per > 1 ? `, ${whole(map.per)} in a cell` : ""}${map.complete ? "" : " (reading…)"}` : "";
    drawLegend(measure, low, high);
    if (map.at >= 0) tellCell();
  }
  // Success fills the cell from below; the other states lie on it with a sign of their own, so that colour is not needed.
  function paintState(pen, cell, x, y, size, colours, mark) {
    const jobs = cell[1] + cell[2] + cell[3] + cell[4] + cell[5];
    let from = y + size;
    for (const state of [1, 2]) {
      const height = (cell[1 + state] / jobs) * size;
      pen.fillStyle = colours[state];
      pen.fillRect(x, from - height, size, height);
      from -= height;
    }
    const worst = cell[5] ? 4 : cell[4] ? 3 : 0;
    if (worst) {
      pen.fillStyle = colours[worst];
      const height = Math.max(size * 0.45, (cell[1 + worst] / jobs) * size);
      pen.fillRect(x, y, size, height);
      pen.strokeStyle = pen.fillStyle = mark;
      pen.lineWidth = 1.4;
      const left = x + size * 0.28, right = x + size * 0.72, top = y + height / 2 - size * 0.16, low = y + height / 2 + size * 0.16;
      pen.beginPath();
      if (worst === 4) { pen.moveTo(left, top); pen.lineTo(right, low); pen.moveTo(right, top); pen.lineTo(left, low); }
      else { pen.moveTo(left, (top + low) / 2); pen.lineTo(right, (top + low) / 2); }
      pen.stroke();
    } else if (cell[3]) {
      pen.fillStyle = mark;
      pen.beginPath();
      pen.arc(x + size / 2, y + size / 2, Math.max(1.2, size * 0.12), 0, 7);
      pen.fill();
    }
  }
  function drawLegend(measure, low, high) {
    const place = $("map-legend");
    place.replaceChildren();
    const add = (text, paint, wide) => {
      const item = document.createElement("span"), box = document.createElement("canvas");
      box.width = wide ? 180 : 14; box.height = 14;
      if (wide) box.className = "scale";
      paint(box.getContext("2d"));
      item.append(box, text);
      place.append(item);
    };
    if (measure) {
      if (high < low) { place.textContent = "Nothing is known of it yet."; return; }
      add(`${measure[1](low)} to ${measure[1](high)}${map.per > 1 ? (map.mode === "rows" ? " in a cell" : ", the highest of a cell") : ""}`, (pen) => { for (let n = 0; n < 180; n++) { pen.fillStyle = shade(n / 179); pen.fillRect(n, 0, 1, 14); } }, true);
      return;
    }
    const colours = STATES.map((name) => colour(`c-${name}`)), mark = colour("c-mark");
    for (const state of [4, 3, 2, 1, 0]) {
      const cell = [0, 0, 0, 0, 0, 0];
      cell[1 + state] = 1;
      const total = map.cells.reduce((sum, one) => sum + (one ? one[1 + state] : 0), 0);
      add(`${NAMES[state]} ${whole(total)}`, (pen) => { pen.fillStyle = colours[0]; pen.fillRect(0, 0, 14, 14); paintState(pen, cell, 0, 0, 14, colours, mark); });
    }
  }
  function tellCell() {
    const cell = map.cells[map.at], place = $("map-cell");
    const first = map.at * map.per, last = Math.min(map.count, first + map.per) - 1;
    const where = first === last ? `Partition ${whole(first)}` : `Partitions ${whole(first)} to ${whole(last)}`;
    if (!cell) { place.textContent = `${where}: not read yet`; return; }
    const parts = STATES.map((_, n) => (cell[1 + n] ? `${first === last ? "" : `${whole(cell[1 + n])} `}${NAMES[n]}` : "")).filter(Boolean);
    if (cell[6] >= 0) parts.push(`${first === last ? "took" : "the longest took"} ${duration(cell[6])}`);
    if (cell[7] >= 0) parts.push(`${whole(cell[7])} rows`);
    if (cell[8] > 1) parts.push(`up to ${cell[8]} attempts`);
    place.textContent = `${where}: ${parts.join(", ")}`;
  }
  async function listCell() {
    const place = $("map-details"), first = map.at * map.per, after = Math.min(map.count, first + map.per);
    const query = new URLSearchParams({ op: $("map").dataset.op, first, after });
    try {
      const answer = await fetch(`/partitions?${query}`);
      if (!answer.ok) { place.textContent = (await answer.json()).error.message; return; }
      place.replaceChildren(...new DOMParser().parseFromString(await answer.text(), "text/html").body.childNodes);
      ages();
    } catch { place.textContent = "The service does not answer."; }
  }
  function startMap(canvas) {
    const cellAt = (event) => {
      const box = canvas.getBoundingClientRect(), column = Math.floor((event.clientX - box.left) / map.side);
      const found = Math.floor((event.clientY - box.top) / map.side) * map.columns + column;
      return column < map.columns && found < map.cells.length ? found : -1;
    };
    canvas.addEventListener("mousemove", (event) => { const found = cellAt(event); if (found >= 0 && found !== map.at) { map.at = found; drawMap(); } });
    canvas.addEventListener("click", (event) => { if (cellAt(event) >= 0) { map.at = cellAt(event); drawMap(); listCell(); } });
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: map.columns, ArrowUp: -map.columns, Home: -map.at, End: map.cells.length - 1 - map.at }[event.key];
      if (step !== undefined && map.cells.length) { map.at = Math.min(map.cells.length - 1, Math.max(0, (map.at < 0 ? 0 : map.at + step))); drawMap(); event.preventDefault(); }
      else if (event.key === "Enter" && map.at >= 0) listCell();
    });
    for (const one of document.querySelectorAll("input[name=mode]")) one.addEventListener("change", () => { map.mode = one.value; drawMap(); });
  }

  // ---------------------------------------------------------------- timeline

  const time = { found: null, at: -1, places: [] };
  window.distopTimeline = time;
  const LEFT = 150, SIGNS = { takeover: "⇄", retry: "↻", failed: "✕" };
  function rowHeight(row) { return row.bars ? Math.max(16, Math.min(10, Math.max(4, 60 / row.lanes)) * row.lanes) : 34; }
  function drawTimeline() {
    const canvas = $("timeline-canvas"), found = time.found;
    if (!canvas) return;
    $("timeline").hidden = !found || !found.rows.length;
    if (!found || !found.rows.length) return;
    const heights = found.rows.map(rowHeight), gap = 8;
    const [pen, width] = fit(canvas, heights.reduce((sum, one) => sum + one + gap, 22));
    const room = width - LEFT - 4, ink = colour("ink"), faint = colour("faint"), line = colour("line");
    const colours = STATES.map((name) => colour(`c-${name}`)), x = (second) => LEFT + (second / found.seconds) * room;
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    let y = 4;
    time.places = [];
    const most = Math.max(1e-9, ...found.rows.flatMap((row) => row.busy || []));
    found.rows.forEach((row, n) => {
      const height = heights[n];
      pen.fillStyle = ink;
      pen.fillText(shorten(pen, row.executor, LEFT - 14), 0, y + height / 2);
      pen.fillStyle = line;
      pen.fillRect(LEFT, y + height + gap / 2 - 1, room, 1);
      if (row.bars) {
        const lane = height / row.lanes;
        for (const [p, first, last, at, state] of row.bars) {
          pen.fillStyle = colours[state];
          pen.fillRect(x(first), y + at * lane, Math.max(1.5, x(last) - x(first) - 0.5), Math.max(2, lane - 1));
        }
      } else {
        const wide = room / row.busy.length;
        pen.fillStyle = colours[2];
        row.busy.forEach((busy, bin) => { const tall = (busy / most) * height; pen.fillRect(LEFT + bin * wide, y + height - tall, Math.ceil(wide), tall); });
      }
      time.places.push([y, height]);
      y += height + gap;
    });
    found.marks.forEach((mark, n) => {
      const [top, height] = time.places[mark.row] || [0, 0], at = x(mark.at);
      pen.fillStyle = mark.kind === "failed" ? colour("danger") : mark.kind === "takeover" ? colour("attention") : colour("active");
      pen.beginPath();
      if (mark.kind === "takeover") { pen.moveTo(at, top - 4); pen.lineTo(at + 5, top + 4); pen.lineTo(at - 5, top + 4); }
      else if (mark.kind === "retry") { pen.arc(at, top, 4, 0, 7); }
      else { pen.rect(at - 3.5, top - 3.5, 7, 7); }
      pen.fill();
      pen.fillRect(at - 0.5, top, 1, height);
      if (n === time.at) { pen.strokeStyle = ink; pen.lineWidth = 2; pen.strokeRect(at - 7, top - 6, 14, height + 8); }
    });
    pen.fillStyle = faint;
    pen.fillText(new Date(found.begin * 1000).toLocaleTimeString(), LEFT, y + 6);
    const end = new Date((found.begin + found.seconds) * 1000).toLocaleTimeString();
    pen.fillText(end, width - pen.measureText(end).width - 4, y + 6);
    $("timeline-span").textContent = `${found.rows.length} executors${found.left ? ` and ${found.left} more` : ""}, ${duration(found.seconds)}`;
    const marks = $("timeline-marks");
    marks.replaceChildren(...found.marks.slice(0, 40).map((mark) => {
      const item = document.createElement("li"), sign = document.createElement("b");
      item.className = mark.kind;
      sign.textContent = SIGNS[mark.kind];
      item.append(sign, ` ${mark.kind} on ${found.rows[mark.row] ? found.rows[mark.row].executor : "?"} after ${duration(mark.at)}: ${mark.text}`);
      return item;
    }));
    canvas.dataset.marks = found.marks.map((mark) => mark.kind).join(" ");
  }
  function shorten(pen, text, room) {
    if (pen.measureText(text).width <= room) return text;
    let kept = text;
    while (kept && pen.measureText(`${kept}…`).width > room) kept = kept.slice(0, -1);
    return `${kept}…`;
  }
  function startTimeline(canvas) {
    canvas.addEventListener("mousemove", (event) => {
      if (!time.found) return;
      const box = canvas.getBoundingClientRect(), room = canvas.parentElement.clientWidth - LEFT - 4;
      const second = ((event.clientX - box.left - LEFT) / room) * time.found.seconds, y = event.clientY - box.top;
      const row = time.places.findIndex(([top, height]) => y >= top - 4 && y <= top + height + 4);
      tellTime(row, second, y);
    });
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key], marks = time.found ? time.found.marks : [];
      if (!step || !marks.length) return;
      time.at = Math.min(marks.length - 1, Math.max(0, time.at + step));
      drawTimeline();
      $("timeline-mark").textContent = `${marks[time.at].kind}: ${marks[time.at].text}`;
      event.preventDefault();
    });
  }
  function tellTime(n, second, y) {
    const row = time.found.rows[n], place = $("timeline-mark");
    if (!row) return;
    const near = time.found.marks.find((mark) => mark.row === n && Math.abs(mark.at - second) < time.found.seconds / 150);
    if (near) { place.textContent = `${near.kind}: ${near.text}`; return; }
    if (row.bars) {
      const lane = Math.floor((y - time.places[n][0]) / (time.places[n][1] / row.lanes));
      const bar = row.bars.find(([, first, last, at]) => at === lane && second >= first && second <= last);
      place.textContent = bar ? `Partition ${whole(bar[0])} on ${row.executor}: ${NAMES[bar[4]]}, attempt ${bar[5]}, ${duration(bar[2] - bar[1])}` : `${row.executor}: ${whole(row.jobs)} jobs`;
    } else {
      const bin = Math.floor((second / time.found.seconds) * row.busy.length);
      place.textContent = `${row.executor}: ${whole(row.jobs)} jobs${row.busy[bin] !== undefined ? `; ${row.busy[bin].toFixed(1)} at a time ${duration(second)} after the first` : ""}`;
    }
  }

  // -------------------------------------------------------------------- live

  const live = { events: 0, cursor: "", opened: 0, seen: [] };
  window.distopLive = live;
  function follow(url, cursor) {
    const label = $("live");
    const tell = (state, text) => { label.dataset.state = state; label.textContent = text; };
    const stream = new EventSource(`${url}&cursor=${encodeURIComponent(cursor)}`);
    live.stream = stream;
    const on = (kind, act) => stream.addEventListener(kind, (event) => {
      live.events += 1;
      live.cursor = event.lastEventId || live.cursor;
      live.seen.push(`${kind}:${event.lastEventId}`);
      if (live.seen.length > 500) live.seen.shift();
      tell("live", "live");
      act(JSON.parse(event.data));
    });
    stream.addEventListener("open", () => { live.opened += 1; tell("live", "live"); });
    stream.addEventListener("error", () => {
      if (stream.readyState === EventSource.CLOSED) tell("lost", "not followed: load the page again"); else tell("lost", "connecting again…");
    });
    on("part", (found) => replace(found.name, found.html));
    on("map", addCells);
    on("timeline", (found) => { time.found = found; drawTimeline(); });
    on("delayed", (found) => tell("lost", found.text));
    on("error-text", (found) => { stream.close(); tell("lost", found.text); });
    on("end", () => { stream.close(); tell("ended", "ended"); });
  }

  let resizing = 0;
  const redraw = () => { cancelAnimationFrame(resizing); resizing = requestAnimationFrame(() => { drawMap(); drawTimeline(); }); };
  window.addEventListener("resize", redraw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  if ($("map-canvas")) startMap($("map-canvas"));
  if ($("timeline-canvas")) { startTimeline($("timeline-canvas")); $("timeline").hidden = true; }
  if ($("start")) startForm($("start"));
  for (const form of document.querySelectorAll("form[data-command]")) preview(form);
  ages();
  setInterval(ages, 1000);
  const { live: url, cursor } = document.body.dataset;
  if (url) follow(url, cursor || "");
})();
