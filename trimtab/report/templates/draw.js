// Draws the figures with the page's own colours, and again when the reader's colour scheme changes.
function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

function styled(trace) {
  const { role, ...rest } = trace;
  const faint = role === "faint";
  const tone = color(faint ? "train" : role);
  return {
    ...rest,
    opacity: faint ? 0.28 : 1,
    line: { color: tone, width: faint ? 1 : 2 },
    marker: { color: tone, size: 6 },
  };
}

function draw() {
  const ink = color("ink"), quiet = color("quiet"), line = color("line"), card = color("card");
  const font = { family: getComputedStyle(document.body).fontFamily, color: quiet, size: 12 };
  for (const [id, figure] of Object.entries(figures)) {
    const axis = { gridcolor: line, linecolor: line, tickcolor: line };
    const layout = {
      ...figure.layout,
      font: font,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      hoverlabel: { bgcolor: card, bordercolor: line, font: { ...font, color: ink } },
      xaxis: { ...figure.layout.xaxis, ...axis, showgrid: false },
      yaxis: { ...figure.layout.yaxis, ...axis },
    };
    const config = { displayModeBar: false, responsive: true };
    Plotly.react("chart-" + id, figure.data.map(styled), layout, config);
  }
}

draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
