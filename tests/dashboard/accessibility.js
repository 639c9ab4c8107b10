// What a reader's eyes, keyboard and screen reader meet on a page, computed in the page itself.
// Each function returns a list of sentences, empty when all is well.
(() => {
  const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  const known = new Map();

  // Whatever CSS calls it (color-mix, light-dark, oklab): red, green, blue of 255 and alpha of 1.
  function rgba(color) {
    if (!known.has(color)) {
      pen.clearRect(0, 0, 1, 1);
      pen.fillStyle = "#0000";
      pen.fillStyle = color;
      pen.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data;
      known.set(color, [r, g, b, a / 255]);
    }
    return known.get(color);
  }

  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3]));

  function luminance(color) {
    const [r, g, b] = color.map((value) => {
      const c = value / 255;
      return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  }

  function ratio(a, b) {
    const [dark, light] = [luminance(a), luminance(b)].sort((x, y) => x - y);
    return (light + 0.05) / (dark + 0.05);
  }

  // In Plotly's SVG a text lies on the box that its own group draws before it, if any.
  function fillBehind(element) {
    const box = element.ownerSVGElement && element.parentNode.querySelector(":scope > rect.bg");
    return box ? [rgba(getComputedStyle(box).fill)] : [];
  }

  const middle = (box) => [box.left + box.width / 2, box.top + box.height / 2];
  const holds = (box, [x, y]) => x >= box.left && x <= box.right && y >= box.top && y <= box.bottom;

  // What may lie beside its own parent, such as the value above a slider's knob, is not before it.
  function background(element) {
    const layers = fillBehind(element);
    const place = middle(element.getBoundingClientRect());
    let scrolled = false;
    for (let at = element; at; at = at.parentElement) {
      if (layers.some((layer) => layer[3] === 1)) break;
      scrolled ||= at.scrollHeight > at.clientHeight && getComputedStyle(at).overflowY !== "visible";
      if (!scrolled && !holds(at.getBoundingClientRect(), place)) continue;
      layers.push(rgba(getComputedStyle(at).backgroundColor));
    }
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
  }

  function opacity(element) {
    let found = 1;
    for (let at = element; at; at = at.parentElement) found *= getComputedStyle(at).opacity;
    return found;
  }

  const shown = (element) => {
    const box = element.getBoundingClientRect();
    const seen = { opacityProperty: true, visibilityProperty: true };
    return box.width > 1 && box.height > 1 && element.checkVisibility(seen);
  };
  const inactive = (element) =>
    element.closest(":disabled, [aria-disabled=true], [data-disabled=true], [aria-hidden=true] svg");
  const words = (text) => text.trim().replace(/\s+/g, " ").slice(0, 40);
  const named = (element) => {
    const kind = (element.getAttribute("class") || "").split(" ").slice(0, 2).join(".");
    const label = element.getAttribute("aria-label") || element.textContent || "";
    return `${element.localName}.${kind} “${words(label)}”`;
  };

  function contrast() {
    const found = new Set();
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
      const element = node.parentElement;
      if (!words(node.data) || element.closest("script, style, template, noscript")) continue;
      if (!shown(element) || inactive(element)) continue;
      const style = getComputedStyle(element);
      const paint = rgba(element.ownerSVGElement ? style.fill : style.color);
      const behind = background(element);
      const color = over([...paint.slice(0, 3), paint[3] * opacity(element)], behind);
      const size = parseFloat(style.fontSize);
      const icon = element.dataset.testid === "stIconMaterial";
      const large = icon || size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
      const is = ratio(color, behind);
      if (is < (large ? 3 : 4.5)) {
        const [text, ground] = [color, behind].map((c) => `rgb(${c.map(Math.round)})`);
        found.add(`${is.toFixed(2)}: ${text} on ${ground}: ${named(element)}`);
      }
    }
    return [...found];
  }

  const NAMED = ["aria-label", "aria-labelledby", "title", "alt"];
  const hasName = (element) =>
    NAMED.some((name) => element.getAttribute(name)) || words(element.textContent);

  function alternatives() {
    const lacking = [];
    for (const image of document.querySelectorAll("img, [role=img], [data-testid=stPlotlyChart]"))
      if (shown(image) && !image.getAttribute("aria-label") && !image.getAttribute("alt"))
        if (image.getAttribute("alt") !== "") lacking.push(`no text alternative: ${named(image)}`);
    for (const cell of document.querySelectorAll("th"))
      if (shown(cell) && !cell.getAttribute("scope")) lacking.push(`no scope: ${named(cell)}`);
    for (const one of document.querySelectorAll("button, a[href], input, select, summary")) {
      const label = one.labels && one.labels[0];
      if (shown(one) && !hasName(one) && !(label && hasName(label)))
        lacking.push(`no name: ${named(one)}`);
    }
    if (!document.documentElement.lang) lacking.push("the page says no language");
    if (document.querySelectorAll("h1").length > 1) lacking.push("more than one h1");
    if (!document.querySelector("h1, h2")) lacking.push("no heading");
    return lacking;
  }

  const ACTIVE =
    "a[href], button, input, select, textarea, summary, [role=button], [role=link], [role=tab], " +
    "[role=combobox], [role=slider], [role=radio], [role=checkbox], [tabindex='0']";
  const looks = (element) => {
    const parts = [];
    for (let at = element, i = 0; at && i < 4; at = at.parentElement, i++) {
      const s = getComputedStyle(at);
      const line = s.outlineStyle === "none" || s.outlineWidth === "0px" ? "" : s.outline;
      parts.push([line, s.boxShadow, s.borderColor, s.backgroundColor, s.color,
                  s.textDecorationLine, s.opacity].join());
    }
    return parts.join("|");
  };
  // Of a group in which arrow keys move, or step a number, one takes the Tab key.
  const GROUPS = "[role=radiogroup], [role=toolbar], [role=group], [role=tablist], " +
    "[data-testid=stNumberInputContainer]";
  const inGroup = (element) => element.closest(GROUPS);

  // Before the first Tab: every active element, and how it looks without the focus.
  function beforeTabbing() {
    window.qwActive = new Map();
    for (const one of document.querySelectorAll(ACTIVE))
      if (!inactive(one) && one.checkVisibility()) window.qwActive.set(one, looks(one));
    window.qwReached = new Set();
    window.qwUnseen = [];
    return window.qwActive.size;
  }

  // After each Tab: whether what has the focus can be told; false once it has come round.
  // React and transitions may show the focus some frames later.
  async function afterTab() {
    const one = document.activeElement;
    if (one === document.body || window.qwReached.has(one)) return false;
    window.qwReached.add(one);
    const plain = looks(one) === window.qwActive.get(one) ? window.qwActive.get(one) : null;
    for (let i = 0; i < 40 && looks(one) === plain; i++) await new Promise((go) => setTimeout(go, 50));
    if (looks(one) === plain) window.qwUnseen.push(`no focus seen: ${named(one)}`);
    return true;
  }

  function afterTabbing() {
    const reached = [...window.qwReached];
    const missed = [...window.qwActive.keys()].filter((one) => {
      if (!one.isConnected || window.qwReached.has(one) || one.matches(":disabled")) return false;
      const group = inGroup(one);
      return !(group && reached.some((other) => group.contains(other)));
    });
    return [...window.qwUnseen, ...missed.map((one) => `not by keyboard: ${named(one)}`)];
  }

  window.qwCheck = { contrast, alternatives, beforeTabbing, afterTab, afterTabbing };
})();
