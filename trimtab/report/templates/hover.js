// Shows values under the pointer, or at a point selected with the arrow keys; the charts work without a script.
function nearest(xs, step) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= step) low = middle; else high = middle;
  }
  return step - xs[low] <= xs[high] - step ? low : high;
}

function element(parent, tag, name, text) {
  const made = parent.appendChild(document.createElement(tag));
  made.className = name;
  if (text !== undefined) made.textContent = text;
  return made;
}

function tip_row(tip, role, name, value) {
  const row = element(tip, "div", "");
  element(row, "i", "swatch " + role);
  element(row, "span", "", name);
  element(row, "b", "", value);
}

// Places the tooltip next to the vertical line at x percent, on the side with enough space and inside the chart.
function place_tip(area, tip, x) {
  const width = area.clientWidth, place = width * x / 100;
  const wanted = place + 12 + tip.offsetWidth <= width ? place + 12 : place - 12 - tip.offsetWidth;
  tip.style.left = Math.max(0, Math.min(wanted, width - tip.offsetWidth)) + "px";
}

function follow(area, figure) {
  const [left, right] = figure.x, [bottom, top] = figure.y;
  const steps = [...new Set(figure.lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  const rule = element(area, "div", "rule"), tip = element(area, "div", "tip");
  const dots = figure.lines.map((line) => element(area, "div", "dot-at " + line.role));
  const named = (i) => figure.titles ? figure.titles[i] : "step " + steps[i].toLocaleString("en");
  tip.setAttribute("role", "status");
  let at = steps.length - 1;

  function hide() { area.classList.remove("shown"); }

  function show(index) {
    at = Math.max(0, Math.min(steps.length - 1, index));
    const step = steps[at], x = 100 * (step - left) / (right - left);
    rule.style.left = x + "%";
    tip.replaceChildren();
    element(tip, "b", "", named(at));
    figure.lines.forEach((line, i) => {
      const j = nearest(line.x, step), value = line.y[j];
      const known = value !== null && line.x.length > 0;
      dots[i].hidden = !known;
      if (known) {
        dots[i].style.left = 100 * (line.x[j] - left) / (right - left) + "%";
        dots[i].style.top = 100 * (top - value) / (top - bottom) + "%";
      }
      if (line.x.length === 0) return;
      const when = line.x[j] === step ? "" : " (" + named(nearest(steps, line.x[j])) + ")";
      const number = known ? String(Number(value.toPrecision(4))) : "not finite";
      tip_row(tip, line.role, line.name + when, line.text ? line.text[j] : number);
    });
    area.classList.add("shown");
    place_tip(area, tip, x);
  }

  function point(event) {
    const box = area.getBoundingClientRect();
    show(nearest(steps, left + (right - left) * (event.clientX - box.left) / box.width));
  }

  area.addEventListener("pointermove", point);
  area.addEventListener("pointerdown", point);
  area.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hide(); });
  area.addEventListener("focus", () => show(at));
  area.addEventListener("blur", hide);
  document.addEventListener("pointerdown", (event) => { if (!area.contains(event.target)) hide(); });
  area.addEventListener("keydown", (event) => {
    const far = event.shiftKey ? Math.max(1, Math.round(steps.length / 20)) : 1;
    const moves = { ArrowLeft: at - far, ArrowRight: at + far, Home: 0, End: steps.length - 1 };
    if (event.key in moves) { show(moves[event.key]); event.preventDefault(); }
    if (event.key === "Escape") hide();
  });
}

for (const [id, figure] of Object.entries(figures)) {
  if (figure.lines) follow(document.getElementById("chart-" + id), figure);
}
