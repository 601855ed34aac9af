// Runs before anything is drawn, so that no page flashes in the wrong colours.
// Knows only the theme: "system", "light" or "dark", kept in localStorage.
(() => {
  let wanted = "system";
  try { wanted = localStorage.getItem("specserve.theme") || "system"; } catch { /* no storage */ }
  if (wanted === "light" || wanted === "dark") document.documentElement.dataset.theme = wanted;
})();
