// Stacks: shows values under the pointer, and zooms by dragging, pinching, mouse wheel, keys or buttons.
const WIDE = 2000, HIGH = 1000, MOST = 1500;

function sums(changes) {
  let sum = 0;
  return changes.map((change) => (sum += change));
}

function words(value, unit) {
  if (unit !== "bytes") {
    const short = Math.abs(value) < 1e15 && (Math.abs(value) >= 1e-6 || value === 0);
    const text = short ? value.toLocaleString("en", { maximumSignificantDigits: 4 }) : value.toExponential(2);
    return unit ? text + " " + unit : text;
  }
  if (value >= 2 ** 60) return value.toExponential(2) + " B";
  const names = ["B", "KiB", "MiB", "GiB", "TiB"];
  let size = value, i = 0;
  while (size >= 1024 && i < 4) { size /= 1024; i += 1; }
  return size.toFixed(i === 0 ? 0 : size < 10 ? 2 : 1) + " " + names[i];
}

// Round numbers in a range, spaced by 1, 2 or 5 times a power of ten.
function round_ticks(low, high, most) {
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
  const apart = [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough * (1 - 1e-9));
  const found = [], digits = Math.max(0, -Math.floor(Math.log10(apart)));
  for (let i = Math.ceil(low / apart - 1e-9); i <= high / apart + 1e-9; i += 1) {
    found.push(Number((i * apart).toFixed(Math.min(digits, 20))));
  }
  return found;
}

function svg(parent, tag, attributes, text) {
  const made = parent.appendChild(document.createElementNS(parent.namespaceURI, tag));
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
}

// Decodes the figure's moments: x, the edges of each band, and the sum of all bands.
function unpack(figure) {
  const x = sums(figure.x).map((step) => figure.start + step * figure.dx);
  const end = figure.start + figure.end * figure.dx;
  const values = figure.bands.map((band) => sums(band.values).map((value) => value * figure.dy));
  const tops = [];
  values.forEach((band, i) => tops.push(band.map((value, j) => value + (i ? tops[i - 1][j] : 0))));
  return { x, end, values, tops, total: tops[tops.length - 1], title: sums(figure.title) };
}

// The last moment that starts at or before a position.
function moment_at(x, place) {
  let low = 0, high = x.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (x[middle] <= place) low = middle; else high = middle - 1;
  }
  return low;
}

// Reduces many moments to the minimum, maximum and last of each interval.
function thin(first, last, total) {
  const stretch = Math.max(1, Math.ceil(3 * (last - first + 1) / MOST)), kept = [];
  for (let start = first; start <= last; start += stretch) {
    const stop = Math.min(start + stretch - 1, last);
    let least = start, greatest = start;
    for (let i = start; i <= stop; i += 1) {
      if (total[i] < total[least]) least = i;
      if (total[i] > total[greatest]) greatest = i;
    }
    kept.push(...[...new Set([least, greatest, stop])].sort((a, b) => a - b));
  }
  return kept;
}

function draw(area, figure, data, [low, high]) {
  const plot = area.closest(".plot"), first = moment_at(data.x, low), last = moment_at(data.x, high);
  const kept = thin(first, last, data.total);
  const limit = figure.limit ?? 0, whole = low === figure.start && high === data.end;
  const most = kept.reduce((best, i) => Math.max(best, data.total[i]), 0) || 1;
  const top = 1.06 * (limit > 0 && (whole || limit <= 1.6 * most) ? Math.max(most, limit) : most);
  const across = (x) => Math.round(WIDE * (Math.max(x, low) - low) / (high - low));
  const down = (y) => Math.round(HIGH * (1 - y / top));
  const paths = [...area.querySelectorAll("path.band")].reverse();
  data.tops.forEach((edge, band) => {
    const steps = kept.map((i) => "H" + across(data.x[i]) + "V" + down(edge[i]));
    paths[band].setAttribute("d", "M0," + HIGH + steps.join("") + "H" + WIDE + "V" + HIGH + "Z");
  });
  area.querySelector("path.limit").setAttribute("d", limit > 0 && limit <= top ? "M0," + down(limit) + "H" + WIDE : "");
  draw_y(plot, area, figure.unit, top, down);
  draw_x(plot, area, figure, low, high, across);
}

function draw_y(plot, area, unit, top, down) {
  const axis = plot.querySelector(".y-axis"), grids = area.querySelector(".grids");
  const step = unit === "bytes" ? 1024 ** Math.min(3, Math.floor(Math.log(Math.max(top, 1)) / Math.log(1024))) : 1;
  const name = unit === "bytes" ? " " + ["B", "KiB", "MiB", "GiB"][Math.round(Math.log(step) / Math.log(1024))] : "";
  axis.replaceChildren();
  grids.replaceChildren();
  for (const tick of round_ticks(0, top / step, 6)) {
    const place = down(tick * step), text = tick === 0 ? "0" : words(tick, "") + name;
    svg(axis, "text", { x: "100%", y: place / 10 + "%", dy: ".32em" }, text);
    svg(grids, "path", { class: "grid", d: "M0," + place + "H" + WIDE });
  }
}

// The visible part of each phase, longest first.
function visible_phases(phases, low, high) {
  return phases.map(([name, start, end]) => [name, Math.max(start, low), Math.min(end, high)])
    .filter(([, start, end]) => start < end).sort((a, b) => (b[2] - b[1]) - (a[2] - a[1]));
}

function draw_x(plot, area, figure, low, high, across) {
  const width = area.clientWidth, phases = plot.querySelector(".phases"), seams = area.querySelector(".seams");
  seams.replaceChildren();
  phases?.replaceChildren();
  for (const [, start] of figure.phases) {
    if (start > low && start < high) svg(seams, "path", { class: "seam", d: "M" + across(start) + ",0V" + HIGH });
  }
  const taken = [];
  for (const [name, left, right] of visible_phases(figure.phases, low, high)) {
    // As in the static page: names of longer phases have priority, and names do not overlap.
    const middle = across((left + right) / 2) / WIDE, half = 3.5 * (name.length + 1) / width;
    if (middle < half || middle > 1 - half || taken.some(([a, b]) => middle + half > a && b > middle - half)) continue;
    taken.push([middle - half, middle + half]);
    if (phases) svg(phases, "text", { class: "middle", x: 100 * middle + "%", y: "1em" }, name);
  }
  const axis = plot.querySelector(".x-axis:not(.phases)");
  axis?.replaceChildren();
  for (const tick of axis ? round_ticks(low, high, Math.max(2, Math.floor(width / 95))) : []) {
    const percent = across(tick) / 20, anchor = percent < 3 ? "start" : percent > 97 ? "end" : "middle";
    const digits = Math.max(0, Math.min(9, Math.ceil(-Math.log10(high - low)) + 2));
    svg(axis, "text", { class: anchor, x: percent + "%", y: "1em" }, tick.toLocaleString("en", { maximumFractionDigits: digits }));
  }
}

function explore(area, figure) {
  const data = unpack(figure), all = [figure.start, data.end], least = (all[1] - all[0]) / 1e5;
  const rule = element(area, "div", "rule"), tip = element(area, "div", "tip");
  const mark = element(area, "div", "selection"), bar = document.createElement("div");
  let range = all, at = figure.peak, pressed = null, pinch = null;
  const fingers = new Map();
  const zoomed = () => range !== all;
  tip.setAttribute("role", "status");
  mark.hidden = true;

  function show(index) {
    at = Math.max(0, Math.min(data.x.length - 1, index));
    const start = data.x[at], end = data.x[at + 1] ?? data.end;
    const middle = (Math.max(start, range[0]) + Math.min(end, range[1])) / 2;
    const x = 100 * (middle - range[0]) / (range[1] - range[0]);
    const place = (figure.place + " " + words(start, figure.place_unit)).trim();
    rule.style.left = x + "%";
    tip.replaceChildren();
    element(tip, "b", "", (figure.titles[data.title[at]] ?? place) + ": " + words(data.total[at], figure.unit));
    for (let band = figure.bands.length - 1; band >= 0; band -= 1) {
      const { role, name } = figure.bands[band], value = data.values[band][at];
      if (value > 0) tip_row(tip, "block " + role, name, words(value, figure.unit));
    }
    area.classList.add("shown");
    place_tip(area, tip, x);
  }

  function zoom(low, high) {
    const wide = Math.min(Math.max(high - low, least), all[1] - all[0]);
    const left = Math.min(Math.max(low, all[0]), all[1] - wide);
    range = wide >= (all[1] - all[0]) * (1 - 1e-9) ? all : [left, left + wide];
    area.classList.remove("shown");
    out.disabled = whole.disabled = !zoomed();
    draw(area, figure, data, range);
  }

  function scale(factor, place) {
    zoom(place - (place - range[0]) * factor, place + (range[1] - place) * factor);
  }

  // Center for zooming with keys and buttons: the selected moment, or the middle.
  function center() {
    const inside = data.x[at] >= range[0] && data.x[at] <= range[1];
    return inside ? data.x[at] : (range[0] + range[1]) / 2;
  }

  // Moments outside the visible range are clamped to it.
  function step_to(index) {
    const next = Math.max(0, Math.min(data.x.length - 1, index)), x = data.x[next], wide = range[1] - range[0];
    if (x < range[0] || x >= range[1]) zoom(x - wide / 2, x + wide / 2);
    show(next);
  }

  function share_of(event) {
    const box = area.getBoundingClientRect();
    return Math.max(0, Math.min(1, (event.clientX - box.left) / box.width));
  }

  const place_of = (event) => range[0] + (range[1] - range[0]) * share_of(event);
  const apart = () => [...fingers.values()].sort((a, b) => a - b);

  function button(text, label, act) {
    const made = element(bar, "button", "", text);
    made.type = "button";
    made.setAttribute("aria-label", label);
    made.addEventListener("click", act);
    return made;
  }

  bar.className = "zoom";
  element(bar, "span", "", matchMedia("(hover: hover)").matches ? "Drag across the chart to zoom in." : "");
  button("+", "zoom in", () => scale(0.5, center()));
  const out = button("−", "zoom out", () => scale(2, center()));
  const whole = button("all", "show all", () => zoom(...all));
  out.disabled = whole.disabled = true;
  area.closest(".plot").before(bar);

  area.addEventListener("pointerdown", (event) => {
    fingers.set(event.pointerId, share_of(event));
    if (event.pointerType === "mouse" && event.button === 0) {
      pressed = place_of(event);
      area.setPointerCapture(event.pointerId);
    }
    pinch = fingers.size === 2 ? apart().map((share) => range[0] + (range[1] - range[0]) * share) : null;
    show(moment_at(data.x, place_of(event)));
  });
  area.addEventListener("pointermove", (event) => {
    const place = place_of(event);
    if (fingers.has(event.pointerId)) fingers.set(event.pointerId, share_of(event));
    if (pinch && fingers.size === 2) {
      // The positions that both fingers touched first remain below them.
      const [left, right] = apart(), wide = (pinch[1] - pinch[0]) / Math.max(right - left, 0.01);
      zoom(pinch[0] - left * wide, pinch[0] + (1 - left) * wide);
      return;
    }
    if (pressed !== null) {
      const [left, right] = [Math.min(pressed, place), Math.max(pressed, place)], wide = range[1] - range[0];
      mark.hidden = right - left < wide / 200;
      mark.style.left = 100 * (left - range[0]) / wide + "%";
      mark.style.width = 100 * (right - left) / wide + "%";
    }
    show(moment_at(data.x, place));
  });
  function release(event) {
    const place = place_of(event), from = pressed;
    fingers.delete(event.pointerId);
    pinch = pressed = null;
    mark.hidden = true;
    if (event.type === "pointerup" && from !== null && Math.abs(place - from) > (range[1] - range[0]) / 100) {
      zoom(Math.min(from, place), Math.max(from, place));
    }
  }
  area.addEventListener("pointerup", release);
  area.addEventListener("pointercancel", release);
  area.addEventListener("dblclick", () => zoom(...all));
  area.addEventListener("wheel", (event) => {
    // The wheel over an unfocused chart scrolls the page; a pinch on a touchpad sets ctrlKey.
    if (!event.ctrlKey && !event.metaKey && document.activeElement !== area) return;
    event.preventDefault();
    const wide = range[1] - range[0], across = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (across) zoom(range[0] + wide * event.deltaX / 1000, range[1] + wide * event.deltaX / 1000);
    else scale(Math.exp(Math.max(-100, Math.min(100, event.deltaY)) / 300), place_of(event));
    show(moment_at(data.x, place_of(event)));
  }, { passive: false });
  const hide = () => area.classList.remove("shown");
  area.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse" && pressed === null) hide(); });
  area.addEventListener("focus", () => { if (pressed === null) show(at); });
  area.addEventListener("blur", hide);
  document.addEventListener("pointerdown", (event) => { if (!area.contains(event.target)) hide(); });
  area.addEventListener("keydown", (event) => {
    const inside = moment_at(data.x, range[1]) - moment_at(data.x, range[0]);
    const far = event.shiftKey ? Math.max(1, Math.round(inside / 20)) : 1;
    const moves = { ArrowLeft: at - far, ArrowRight: at + far, Home: 0, End: data.x.length - 1 };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in moves) step_to(moves[event.key]);
    else if (event.key === "+" || event.key === "=") { scale(0.5, center()); show(at); }
    else if (event.key === "-" || event.key === "_") { scale(2, center()); show(at); }
    else if (event.key === "0" || (event.key === "Escape" && zoomed())) { zoom(...all); show(at); }
    else if (event.key === "Escape") { hide(); return; }
    else return;
    event.preventDefault();
  });
}

for (const [id, figure] of Object.entries(figures)) {
  if (figure.bands) explore(document.getElementById("chart-" + id), figure);
}
