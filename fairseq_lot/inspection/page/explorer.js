"use strict";
(async () => {
const packed = Uint8Array.from(atob(document.getElementById("maps").textContent), (byte) => byte.charCodeAt(0));
const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
const maps = await new Response(unpacked).json();
const byId = (id) => document.getElementById(id);
const CELL = 12, BAR = 40;

function svg(name, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  if (text !== undefined) node.textContent = text;
  return node;
}

function values(packed) {
  const bytes = atob(packed.bytes);
  const step = (packed.high - packed.low) / 255;
  return Array.from(bytes, (byte) => packed.low + step * byte.charCodeAt(0));
}

function colour(value, scale) {
  const style = getComputedStyle(document.documentElement);
  const rgb = (name) => style.getPropertyValue(name).split(",").map(Number);
  const low = rgb("--low"), high = rgb(value < 0 ? "--negative" : "--high");
  const share = Math.sqrt(Math.min(1, Math.abs(value) / scale)); // so that small shares are seen
  return `rgb(${low.map((from, i) => Math.round(from + (high[i] - from) * share))})`;
}

// 256 shades a scale are enough, and a style is slow to ask for
function palette(scale) {
  const known = new Map();
  return (value) => {
    const key = Math.round(255 * value / scale);
    if (!known.has(key)) known.set(key, colour(value, scale));
    return known.get(key);
  };
}

// A matrix with its tokens; bars for the sums where they are given
function draw(packed, shade, left, below, leftTitle, belowTitle, sums, mass) {
  const width = packed.columns * CELL, height = packed.rows * CELL;
  const letters = (tokens) => 7 + 5 * Math.max(...tokens.map((token) => token.length));
  const x0 = letters(left) + 14, y0 = mass ? height + BAR + 6 : height + 2;
  const total = x0 + width + (sums ? BAR + 8 : 4), tall = y0 + letters(below) + 16;
  const root = svg("svg", {viewBox: `0 0 ${total} ${tall}`, role: "img",
    "aria-label": `${leftTitle} by ${belowTitle}`});
  root.style.maxWidth = `${2 * total}px`;
  root.style.setProperty("--full-width", `${total}px`);
  values(packed).forEach((value, i) => {
    const row = Math.floor(i / packed.columns), column = i % packed.columns;
    const cell = svg("rect", {x: x0 + column * CELL, y: row * CELL, width: CELL, height: CELL, fill: shade(value)});
    cell.dataset.says = `${leftTitle} ${row} “${left[row]}”, ${belowTitle} ${column} “${below[column]}”: ${value.toFixed(3)}`;
    root.append(cell);
  });
  left.forEach((token, i) => root.append(
    svg("text", {x: x0 - 3, y: i * CELL + 9, "font-size": 8, "text-anchor": "end"}, token)));
  below.forEach((token, i) => {
    const x = x0 + i * CELL + 9;
    root.append(svg("text", {x, y: y0, "font-size": 8, "text-anchor": "end", transform: `rotate(-90 ${x} ${y0})`}, token));
  });
  root.append(svg("text", {x: 8, y: height / 2, "font-size": 9, "text-anchor": "middle",
    transform: `rotate(-90 8 ${height / 2})`}, leftTitle));
  root.append(svg("text", {x: x0 + width / 2, y: tall - 3, "font-size": 9, "text-anchor": "middle"}, belowTitle));
  if (sums) bars(root, sums, (i, size) => ({x: x0 + width + 4, y: i * CELL + 2, width: size, height: CELL - 4}), "row sum");
  if (mass) {
    bars(root, mass, (i, size) => ({x: x0 + i * CELL + 2, y: height + 4, width: CELL - 4, height: size}), "receiver mass");
    const fair = height + 4 + BAR / Math.max(2, ...mass);
    root.append(svg("line", {class: "rule", x1: x0, x2: x0 + width, y1: fair, y2: fair}));
  }
  const frame = document.createElement("div");
  frame.className = "wide";
  frame.append(root);
  return frame;
}

function bars(root, sizes, place, title) {
  const most = Math.max(2, ...sizes);
  sizes.forEach((size, i) => {
    const bar = svg("rect", {class: "bar", ...place(i, Math.max(0, size) / most * BAR)});
    bar.dataset.says = `${title} ${i}: ${size}`;
    root.append(bar);
  });
}

function fill(select, labels) {
  const before = select.value;
  select.replaceChildren(...labels.map(([value, label]) => new Option(label, value)));
  if (labels.some(([value]) => String(value) === before)) select.value = before;
}

const unique = (all, name) => [...new Set(all.map((map) => map[name]))];
const controls = {sentence: byId("sentence"), site: byId("site"), layer: byId("layer"), head: byId("head")};

function show() {
  const sentence = maps.sentences[controls.sentence.value];
  let left = sentence.maps.flat();
  for (const name of ["site", "layer", "head"]) {
    fill(controls[name], unique(left, name).map((value) => [value, value]));
    left = left.filter((map) => String(map[name]) === controls[name].value);
  }
  const queries = controls.site.value === "encoder" ? sentence.source : sentence.target;
  const sides = left.map((map) => Math.max(map.map.high, -map.map.low));
  const scale = Math.max(...sides) || 1;
  byId("translation").textContent = sentence.translation;
  const figures = sentence.maps.map((ofModel, i) => {
    const figure = document.createElement("figure"), caption = document.createElement("figcaption");
    const map = ofModel.find((one) => left.includes(one));
    caption.textContent = `${maps.models[i]}: no such head`;
    figure.append(caption);
    if (!map) return figure;
    const both = [...sentence.source, ...sentence.target];  // the decoder's keys with --cross-self-attention
    const keys = map.site === "decoder" ? both.slice(-map.map.columns) : sentence.source;
    caption.textContent = `${maps.models[i]} (${map.attention}), Δ(A) = ${map.imbalance.toFixed(3)}, ` +
      `colours from 0 to ${scale.toFixed(2)}`;
    figure.append(draw(map.map, palette(scale), queries, keys, "query", "key", map.row_sums, map.receiver_mass));
    if (map.pivots) figure.append(...clusterings(map.pivots, queries, keys));
    return figure;
  });
  byId("panels").replaceChildren(...figures);
}

// The two soft clusterings: the pivots of a query, the pivots of a key
function clusterings([ofQueries, ofKeys], queries, keys) {
  const names = Array.from({length: ofQueries.columns}, (_, i) => String(i));
  return [[ofQueries, queries, "query"], [ofKeys, keys, "key"]].map(([packed, tokens, title]) => {
    const details = document.createElement("details"), summary = document.createElement("summary");
    details.open = true;
    summary.textContent = `Soft clustering p(pivot | ${title}), colours from 0 to ${packed.high.toFixed(2)}`;
    details.append(summary, draw(packed, palette(packed.high), tokens, names, title, "pivot"));
    return details;
  });
}

function step(select, by) {
  const to = select.selectedIndex + by;
  if (to >= 0 && to < select.length) { select.selectedIndex = to; show(); }
}

const KEYS = {ArrowLeft: ["head", -1], ArrowRight: ["head", 1], ArrowUp: ["layer", -1], ArrowDown: ["layer", 1],
  PageUp: ["sentence", -1], PageDown: ["sentence", 1]};
byId("panels").addEventListener("keydown", (event) => {
  if (event.target !== byId("panels") || !(event.key in KEYS)) return;
  event.preventDefault();
  step(controls[KEYS[event.key][0]], KEYS[event.key][1]);
});
for (const kind of ["pointerover", "pointerdown"]) {
  byId("panels").addEventListener(kind, (event) => {
    if (event.target.dataset.says) byId("cell").textContent = event.target.dataset.says;
  });
}
byId("full").addEventListener("change", (event) => byId("panels").classList.toggle("full", event.target.checked));
for (const name in controls) controls[name].addEventListener("change", show);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);

function spell(pieces) {
  const ofSentencepiece = pieces.some((piece) => piece.includes("▁"));
  const text = ofSentencepiece ? pieces.join("").replaceAll("▁", " ") : pieces.join(" ").replaceAll("@@ ", "");
  return text.replace("</s>", "").trim().slice(0, 40);
}

fill(controls.sentence, maps.sentences.map((sentence, i) => [i, `${i + 1}: ${spell(sentence.source)}`]));
byId("explorer").hidden = false;
show();
})();
