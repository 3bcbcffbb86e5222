"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figure-data").textContent);
  const logarithmic = document.getElementById("logarithmic");

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const axis = (title) => ({
    title: { text: title, standoff: 8, font: { size: 12 } }, gridcolor: colour("--grid"), linecolor: colour("--line"),
    zerolinecolor: colour("--grid"), automargin: true, exponentformat: "power", minexponent: 5, separatethousands: true,
  });

  function draw() {
    for (const figure of figures) {
      const traces = figure.traces.map((trace) => ({
        type: "scatter",
        mode: trace.is_bound || trace.x.length > 60 ? "lines" : "lines+markers",
        marker: { size: Math.max(5, trace.width || 0) },
        name: trace.name,
        x: trace.x,
        y: trace.y,
        opacity: trace.x.length > 200 ? 0.75 : 1, // of noisy curves that lie on one another, all are seen
        line: {
          color: colour(`--c${trace.colour % 8}`), width: trace.width || (trace.is_dashed ? 2.6 : 1.6),
          dash: trace.is_bound ? "dot" : trace.is_dashed ? "dash" : "solid",
        },
      }));
      const isLogarithmic = figure.logarithmic || logarithmic?.checked;
      const layout = {
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
        font: { color: colour("--text"), family: "system-ui, sans-serif", size: 12 },
        margin: { l: 10, r: 10, t: 10, b: 10 },
        xaxis: axis("step"),
        yaxis: {
          ...axis(figure.axis), type: isLogarithmic ? "log" : "linear",
          ...(figure.range && !isLogarithmic ? { range: figure.range } : { autorange: true }),
        },
        showlegend: traces.length > 1,
        legend: { orientation: "h", y: -0.25 },
        hovermode: "x unified",
        hoverlabel: { bgcolor: colour("--back"), bordercolor: colour("--line"), font: { color: colour("--text") } },
      };
      Plotly.react(figure.id, traces, layout, { displayModeBar: false, responsive: true });
    }
  }

  function search(input) {
    const rows = [...document.getElementById(input.dataset.rows).tBodies[0].rows];
    const count = document.getElementById(`${input.dataset.rows}-count`);
    input.addEventListener("input", () => {
      const wanted = input.value.toLowerCase();
      let found = 0;
      for (const row of rows) {
        row.hidden = !row.textContent.toLowerCase().includes(wanted);
        found += row.hidden ? 0 : 1;
      }
      count.textContent = wanted ? `${found} of ${rows.length}` : "";
    });
  }

  if (figures.length) {
    draw();
    logarithmic?.addEventListener("change", draw);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  }
  document.querySelectorAll("input[data-rows]").forEach(search);
})();
