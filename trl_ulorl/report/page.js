"use strict";
(() => {
  const text = document.getElementById("plotted").textContent;
  const plotted = JSON.parse(text);
  const isDark = matchMedia("(prefers-color-scheme: dark)");
  const isNarrow = matchMedia("(max-width: 600px)");

  // The figures are in the light page's colours; each has its counterpart on the dark one.
  const coloured = (figure) => {
    let json = JSON.stringify(figure);
    if (isDark.matches) for (const [light, dark] of plotted.colours) json = json.replaceAll(light, dark);
    return JSON.parse(json);
  };

  const draw = () => {
    const template = plotted.themes[isDark.matches ? "dark" : "light"];
    for (const node of document.querySelectorAll("[data-chart]")) {
      const figure = coloured(plotted.charts[node.dataset.chart]);
      // A finger that drags scrolls the page.
      const layout = { ...figure.layout, template, dragmode: isNarrow.matches ? false : "zoom" };
      if (isNarrow.matches) {  // the legend has a line for each entry, which must not take from the plot
        const entries = figure.data.filter((trace) => trace.showlegend !== false).length;
        layout.height = (layout.height || 300) + 20 * Math.max(0, entries - 1);
      }
      node.style.height = `${layout.height || 320}px`;
      Plotly.react(node, figure.data, layout, {
        responsive: true,
        displaylogo: false,
        displayModeBar: isNarrow.matches ? false : "hover",
        modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]],
      });
    }
  };

  draw();
  isDark.addEventListener("change", draw);
  isNarrow.addEventListener("change", draw);
})();
