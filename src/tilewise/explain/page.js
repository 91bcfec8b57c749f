"use strict";
(() => {
  // The theme follows the system until somebody chooses.
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.style.colorScheme || (dark.matches ? "dark" : "light")) === "dark";
  const say = () => { button.textContent = isDark() ? "Light" : "Dark"; };
  button.hidden = false;
  button.addEventListener("click", () => {
    root.style.colorScheme = isDark() ? "light" : "dark";
    say();
  });
  dark.addEventListener("change", say);
  say();

  // A box that scrolls can be reached by keyboard, one that does not is no stop.
  const boxes = [...document.querySelectorAll(".scroll")];
  const reach = (box) => {
    if (box.scrollWidth > box.clientWidth) {
      box.tabIndex = 0;
      box.setAttribute("role", "region");
      box.setAttribute("aria-label", box.dataset.label);
    } else {
      for (const name of ["tabindex", "role", "aria-label"]) box.removeAttribute(name);
    }
  };
  const watch = new ResizeObserver((entries) => entries.forEach((entry) => reach(entry.target)));
  boxes.forEach((box) => watch.observe(box));

  // The rows of a picture are one stop; arrow keys go from row to row. What a row shows is said
  // below the picture. (Listeners are on the figure: one on the svg would make it a stop itself.)
  for (const picture of document.querySelectorAll("svg.rows")) {
    const figure = picture.closest("figure");
    const rows = [...picture.querySelectorAll(".row")];
    const tell = (event) => {
      const row = event.target.closest(".row");
      if (row) figure.querySelector(".readout").textContent = row.getAttribute("aria-label");
      return row;
    };
    rows[0]?.setAttribute("tabindex", "0");
    figure.addEventListener("pointerover", tell);
    figure.addEventListener("focusin", (event) => {
      const now = tell(event);
      if (now) rows.forEach((row) => row.setAttribute("tabindex", row === now ? "0" : "-1"));
    });
    figure.addEventListener("keydown", (event) => {
      const at = rows.indexOf(event.target);
      const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: rows.length - 1 }[event.key];
      if (at < 0 || to === undefined) return;
      event.preventDefault();
      rows[Math.max(0, Math.min(rows.length - 1, to))].focus();
    });
  }

  // A link to something folded away unfolds it.
  const unfold = () => {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    for (let at = target; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
    if (target) target.scrollIntoView();
  };
  addEventListener("hashchange", unfold);
  unfold();

  // On paper everything is open but the tables that repeat the pictures.
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("details:not([open], .picture details)")];
    folded.forEach((each) => { each.open = true; });
  });
  addEventListener("afterprint", () => folded.forEach((each) => { each.open = false; }));
})();
