"use strict";
// Colours the text by one number or the mean of several, and shows all numbers of a piece. The numbers lie in #data:
// 16 bits each on a logarithmic scale (page.py). Text is only ever set as text.
(() => {
  const by = (id) => document.getElementById(id);
  const data = JSON.parse(by("data").textContent);
  const { blocks, heads, layers, pieces } = data;
  const SHADES = 16;
  const NOTHING = 0xffff;
  const PARTS = ["momentary", "past", "forgotten"];
  const choosers = { what: by("what"), block: by("block"), head: by("head"), layer: by("layer") };
  const text = by("text");
  const spans = Array.from(text.children);
  const places = new Map(spans.map((span, i) => [span, i]));

  const view = (base64) => new DataView(Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0)).buffer);

  function numbers(packed) {
    const codes = view(packed.codes);
    // Number i of series s.
    return (s, i) => {
      const code = codes.getUint16(2 * (s * pieces + i), true);
      if (code === NOTHING) return NaN;
      return code === 0 ? 0 : packed.low[s] * Math.exp(packed.step[s] * (code - 1));
    };
  }

  const starts = view(data.starts);
  const tokenOf = (i) => starts.getUint32(4 * i, true);
  const bits = numbers(data.bits);
  const sizes = Object.fromEntries(PARTS.map((what) => [what, numbers(data.sizes[what])]));

  // Which memories are chosen, as numbers of series.
  function chosen() {
    const range = (chooser, count) =>
      chooser.value === "" ? Array.from({ length: count }, (_, i) => i) : [Number(chooser.value)];
    return range(choosers.block, blocks).flatMap((b) =>
      range(choosers.head, heads).flatMap((h) => range(choosers.layer, layers).map((l) => (b * heads + h) * layers + l)),
    );
  }

  // A size of one piece in multiples of its median over the whole text, averaged over the chosen memories.
  function relative(what, memories, i) {
    const { scale } = data.sizes[what];
    return memories.reduce((sum, s) => sum + sizes[what](s, i) / scale[s], 0) / memories.length;
  }

  // How many of the sorted numbers are less.
  function rank(sorted, value) {
    let low = 0;
    let high = sorted.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (sorted[middle] < value) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  const least = (value) => (Number.isNaN(value) ? -Infinity : value);

  function shown(value) {
    if (Number.isNaN(value)) return "–";
    return value === 0 ? "0" : String(Number(value.toPrecision(4)));
  }

  const unit = () => (choosers.what.value === "bits" ? " bits" : " ×");

  // what is seen now
  let memories = chosen();
  let values = new Float64Array(pieces);
  let sorted = values;
  let pinned = -1;
  let pointed = -1;

  function update() {
    const what = choosers.what.value;
    for (const name of ["block", "head", "layer"]) choosers[name].disabled = what === "bits";
    memories = chosen();
    values = Float64Array.from(spans, (_, i) => (what === "bits" ? bits(0, i) : relative(what, memories, i)));
    sorted = values.map(least).sort();
    by("view").dataset.what = what;
    spans.forEach((span, i) => {
      span.className = `s${Math.floor((rank(sorted, least(values[i])) * SHADES) / pieces)}`;
    });
    const known = sorted.filter((value) => value !== -Infinity);
    const ends = { low: 0, middle: known.length >> 1, high: known.length - 1 };
    for (const [name, at] of Object.entries(ends))
      by(name).textContent = (known.length ? shown(known[at]) : "–") + unit();
    by("says").textContent = sentence(what);
    draw();
    mark();
    tell();
  }

  function sentence(what) {
    const name = choosers.what.selectedOptions[0].textContent;
    if (what === "bits") return `Colour: ${name}.`;
    const part = (kind) => {
      const { value } = choosers[kind];
      return value === "" ? `all ${kind}s` : `${kind} ${Number(value) + 1}`;
    };
    const where = ["block", "head", "layer"].map(part).join(", ");
    if (memories.length > 1)
      return `Colour: ${name}, ${where}: multiples of the median, averaged over ${memories.length} memory layers.`;
    const median = data.sizes[what].scale[memories[0]];
    return `Colour: ${name}, ${where}: multiples of its median, ${shown(median)}.`;
  }

  // the chart: means and maxima of as many neighbours as fit, from the lowest mean up by the square root
  const WIDTH = 1000;
  const HEIGHT = 100;
  const bins = Math.min(pieces, 500);
  const edge = (b) => Math.floor((b * pieces) / bins);

  function draw() {
    const means = [];
    const most = [];
    for (let b = 0; b < bins; b++) {
      const part = values.slice(edge(b), edge(b + 1)).filter((value) => !Number.isNaN(value));
      if (!part.length) continue;
      means.push([b, part.reduce((sum, value) => sum + value, 0) / part.length]);
      most.push([b, Math.max(...part)]);
    }
    const lowest = Math.min(...means.map(([, value]) => value));
    const highest = Math.max(...most.map(([, value]) => value));
    const range = highest - lowest || 1;
    const line = (series) =>
      series
        .map(([b, value], i) => {
          const x = (WIDTH * (b + 0.5)) / bins;
          const y = HEIGHT - 3 - (HEIGHT - 6) * Math.sqrt((value - lowest) / range);
          return `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
        })
        .join("");
    by("means").setAttribute("d", line(means));
    by("most").setAttribute("d", line(most));
    by("top").textContent = means.length ? shown(highest) + unit() : "";
    by("bottom").textContent = means.length ? shown(lowest) + unit() : "";
  }

  // one piece: where it stands, and all its numbers
  function mark() {
    for (const span of text.querySelectorAll(".here")) span.classList.remove("here");
    by("here").setAttribute("d", pinned < 0 ? "" : `M${(WIDTH * (pinned + 0.5)) / pieces} 0V${HEIGHT}`);
    if (pinned < 0) return;
    spans[pinned].classList.add("here");
    by("at").value = String(pinned);
    by("at").setAttribute("aria-valuetext", `token ${tokenOf(pinned)}`);
  }

  function tell() {
    const i = pointed >= 0 ? pointed : pinned;
    const tip = by("tip");
    tip.hidden = i < 0;
    if (i < 0) return;
    const last = i + 1 < pieces ? tokenOf(i + 1) - 1 : data.tokens - 1;
    const which = last > tokenOf(i) ? `tokens ${tokenOf(i)} to ${last}` : `token ${tokenOf(i)}`;
    by("tip-name").textContent = `“${spans[i].textContent.replaceAll("\n", "")}”  ${which}`;
    for (const what of PARTS) {
      by(`tip-${what}`).textContent = shown(relative(what, memories, i));
      by(`tip-${what}-size`).textContent = memories.length === 1 ? shown(sizes[what](memories[0], i)) : "";
    }
    by("tip-bits").textContent = shown(bits(0, i));
    tip.classList.toggle("one", memories.length === 1);
    const share = Math.floor((100 * rank(sorted, least(values[i]))) / pieces);
    by("tip-rank").textContent = `colour: more than ${share} % of what is shown`;
    const box = spans[i].getClientRects()[0];
    if (!box) return;
    const frame = by("reading").getBoundingClientRect();
    const right = document.documentElement.clientWidth - tip.offsetWidth - 8;
    const below = box.bottom + tip.offsetHeight + 12 < window.innerHeight;
    tip.style.left = `${Math.max(Math.min(box.left, right), 8) - frame.left}px`;
    tip.style.top = `${below ? box.bottom - frame.top + 6 : box.top - frame.top - tip.offsetHeight - 6}px`;
  }

  // Stay at a piece (or at none, −1); `block` says how it is scrolled into view, if at all.
  function pin(i, block) {
    pinned = Math.min(i, pieces - 1);
    pointed = -1;
    if (block && pinned >= 0) spans[pinned].scrollIntoView({ block });
    mark();
    tell();
  }

  // Text that is scrolled under a pointer at rest is not pointed at.
  const spot = (event) => `${event.clientX} ${event.clientY}`;
  let rest = "";
  window.addEventListener("pointermove", (event) => {
    rest = spot(event);
  });
  text.addEventListener("pointerover", (event) => {
    if (spot(event) === rest) return;
    pointed = places.has(event.target) ? places.get(event.target) : -1;
    tell();
  });
  text.addEventListener("pointerleave", () => {
    pointed = -1;
    tell();
  });
  text.addEventListener("click", (event) => {
    if (places.has(event.target)) pin(places.get(event.target));
  });
  text.addEventListener("focus", () => {
    if (pinned < 0 && pointed < 0) pin(0);
  });
  text.addEventListener("keydown", (event) => {
    const steps = { ArrowRight: pinned + 1, ArrowLeft: Math.max(pinned - 1, 0), Home: 0, End: pieces - 1, Escape: -1 };
    if (!(event.key in steps) || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    pin(steps[event.key], "nearest");
  });
  by("at").addEventListener("input", () => pin(Number(by("at").value), "center"));
  by("chart").addEventListener("click", (event) => {
    const box = by("chart").getBoundingClientRect();
    const b = Math.min(Math.max(Math.floor(((event.clientX - box.left) / box.width) * bins), 0), bins - 1);
    let peak = edge(b);
    for (let i = edge(b); i < edge(b + 1); i++) if (least(values[i]) > least(values[peak])) peak = i;
    pin(peak, "center");
  });
  for (const chooser of Object.values(choosers)) chooser.addEventListener("change", update);
  window.addEventListener("resize", tell);
  for (const part of document.querySelectorAll("[data-scripted]")) part.hidden = false;
  update();
})();
