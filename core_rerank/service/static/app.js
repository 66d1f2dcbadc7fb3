// The page of `core-rerank serve`: ranks what is pasted and shows which tokens earned each score.
import { headSums, ofHead, parseDocuments, piecesOf, shortScore, snippet } from "/ui/parts.js";

const CHUNK = 25; // documents of one request, where documents do not share a prompt
const AT_ONCE = 2; // such requests at a time
const MOVES = 40; // rows whose moves are shown
const STRONGEST = 6;
const EXAMPLE = [
  "what causes ocean tides?",
  [
    "Sourdough bread rises with wild yeast that is kept alive in a starter.",
    "Ocean tides are caused by the gravity of the Moon and the Sun pulling on the water.",
    "A tidal wave is a shallow-water wave; the name is often wrongly given to a tsunami.",
    "The Moon has no atmosphere to speak of, and its sky is black by day.",
    "High water follows the Moon around the Earth about twice a day.",
  ],
];
const $ = (id) => document.getElementById(id);
let info = null;
let run = null; // the ranking that is shown: {query, documents, items, total, stop}
let drawing = false;

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

async function ask(path, body, signal) {
  for (;;) {
    const options = body ? { method: "POST", body: JSON.stringify(body) } : {};
    const response = await fetch(path, { ...options, headers: headers(), signal });
    const answer = await response.json().catch(() => ({}));
    if (response.ok) return answer;
    if (response.status !== 429) throw new Error(answer.message || `the server answered ${response.status}`);
    const seconds = Number(response.headers.get("Retry-After")) || 1;
    $("status").textContent = `The server is busy: again in ${seconds} s.`;
    await new Promise((resolve) => setTimeout(resolve, 1000 * seconds));
    signal?.throwIfAborted();
  }
}

function complain(error) {
  $("problem").hidden = !error;
  $("problem").textContent = error ? String(error.message || error) : "";
}

async function learn() {
  info = await ask("/info");
  const prompt = info.window === "all" ? "all documents in one prompt" : `${info.window} in a prompt`;
  $("model").textContent = `${info.model_id} · ${info.strategy} · ${prompt} · ${info.backend}`;
  const names = ["all heads", ...(info.heads || []).map((head) => `head ${head}`)];
  $("head").replaceChildren(...names.map((name, i) => new Option(name, i ? info.heads[i - 1] : "")));
  $("by-head").hidden = !info.heads;
}

function countDocuments() {
  try {
    const count = parseDocuments($("documents").value).length;
    $("count").textContent = count === 1 ? "1 document." : `${count || "No"} documents.`;
  } catch (error) {
    $("count").textContent = error.message;
  }
}

async function rank() {
  complain(null);
  run?.stop.abort();
  const stop = new AbortController();
  try {
    const documents = parseDocuments($("documents").value);
    if (!documents.length) throw new Error("There are no documents: paste some, one a line.");
    if (!info) await learn();
    run = { query: $("query").value, documents, items: [], total: documents.length, stop, rows: new Map() };
    $("list").replaceChildren();
    $("results").hidden = false;
    $("stop").hidden = false;
    await rankChunks(run);
  } catch (error) {
    if (!stop.signal.aborted) complain(error);
    stop.abort();
  }
  if (run?.stop === stop) {
    $("stop").hidden = true;
    draw(run);
  }
}

async function rankChunks(mine) {
  // Only where each document has a prompt of its own do scores of several requests compare.
  const size = info.window === 1 ? CHUNK : mine.total;
  const starts = Array.from({ length: Math.ceil(mine.total / size) }, (_, i) => i * size);
  const worker = async () => {
    for (let start = starts.shift(); start !== undefined; start = starts.shift()) {
      const part = mine.documents.slice(start, start + size);
      const documents = part.map(({ text, title }) => (title ? { text, title } : text));
      const screen = info.screen_threshold === null ? false : "flag";
      const answer = await ask("/v1/explain", { query: mine.query, documents, screen }, mine.stop.signal);
      for (const item of answer.documents) {
        mine.items.push({ ...item, index: start + item.index, doc_id: part[item.index].id });
      }
      mine.model = answer.model;
      mine.strategy = answer.strategy;
      drawSoon(mine);
    }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, worker));
}

// What each head gives the tokens of an item; asked for when somebody wants to see it.
async function readByHead(mine, item) {
  if (item.head_scores) return;
  const alone = info.window === 1; // a document's scores do not depend on the others
  const wanted = alone ? [item.index] : mine.documents.map((_, i) => i);
  const documents = wanted.map((i) => mine.documents[i]).map(({ text, title }) => (title ? { text, title } : text));
  const answer = await ask("/v1/explain", { query: mine.query, documents, by_head: true }, mine.stop.signal);
  for (const found of answer.documents) {
    const known = mine.items.find(({ index }) => index === wanted[found.index]);
    if (known) known.head_scores = found.head_scores;
  }
}

function drawSoon(mine) {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    if (run === mine) draw(mine);
  });
}

function draw(mine) {
  const items = mine.items;
  items.sort((a, b) => a.blank - b.blank || b.score - a.score || a.index - b.index);
  items.forEach((item, i) => { item.rank = i + 1; });
  const low = items.reduce((least, item) => Math.min(least, item.score), 0);
  const high = items.reduce((most, item) => Math.max(most, item.score), 0);
  mine.peak = items.reduce((peak, item) => Math.max(peak, strongestOf(item)), 0);
  const before = places();
  const rows = items.map((item) => {
    let row = mine.rows.get(item.index);
    if (!row) mine.rows.set(item.index, (row = makeRow(mine, item)));
    row.place.textContent = item.rank;
    const whole = high - low || 1;
    row.fill.style.left = `${(100 * (Math.min(item.score, 0) - low)) / whole}%`;
    row.fill.style.width = `${(100 * Math.abs(item.score)) / whole}%`;
    return row.li;
  });
  $("list").replaceChildren(...rows);
  showMoves(before);
  $("progress").max = mine.total;
  $("progress").value = items.length;
  const done = items.length === mine.total;
  const state = done ? "" : mine.stop.signal.aborted ? " Stopped." : " Ranking …";
  $("status").textContent = `${items.length} of ${mine.total} documents.${state}`;
}

function strongestOf(item) {
  item.peak ??= (item.token_scores || []).reduce((peak, t) => (t.kept ? Math.max(peak, Math.abs(t.score)) : peak), 0);
  return item.peak;
}

function makeRow(mine, item) {
  const [li, details, summary] = [element("li"), element("details"), element("summary")];
  const place = element("span", "place");
  const name = element("span", "name");
  const title = item.title || item.doc_id;
  if (title !== undefined && title !== null) name.append(element("b", "", title));
  for (const flag of ["truncated", "blank"]) if (item[flag]) name.append(element("span", "flag", flag));
  if (item.flagged) {
    const flag = element("span", "flag suspicious", `suspicious ${shortScore(item.injection)}`);
    flag.title = "May hold orders for the model: the score lies above the threshold.";
    name.append(flag);
  }
  name.append(item.text.slice(0, 200));
  const track = element("span", "track");
  track.setAttribute("aria-hidden", "true");
  const fill = element("span", item.score < 0 ? "fill neg" : "fill");
  track.append(fill);
  summary.append(place, name, track, element("span", "score", shortScore(item.score)));
  details.append(summary);
  // A row's text is made when it is opened: thousands of tokens would take long to lay out.
  const redraw = async () => {
    const head = $("head").value;
    if (details.open && head) await readByHead(mine, item);
    if (head !== $("head").value) return; // another one was chosen meanwhile
    while (details.children.length > 1) details.lastChild.remove();
    if (!details.open) return;
    const seen = head ? ofHead(item, head) : item;
    const peak = head ? seen.token_scores.reduce((most, t) => Math.max(most, Math.abs(t.score)), 0) : mine.peak;
    details.append(...heatMap(seen, peak), ...(item.head_scores ? [headLine(item, head)] : []));
  };
  details.addEventListener("toggle", guarded(redraw));
  li.append(details);
  return { li, place, fill, redraw, details };
}

function headLine(item, chosen) {
  const line = element("p", "heads", "By head: ");
  headSums(item).forEach(([head, sum], i) => {
    line.append(i ? ", " : "", element(head === chosen ? "b" : "span", "", head), ` ${shortScore(sum)}`);
  });
  return line;
}

function heatMap(item, peak) {
  const text = element("p", "text");
  text.dir = "auto";
  const { pieces, unread } = piecesOf(item);
  for (const piece of pieces) {
    if (piece.score === undefined) {
      text.append(piece.text);
      continue;
    }
    const shade = peak > 0 ? Math.sqrt(Math.min(Math.abs(piece.score) / peak, 1)) : 0;
    const token = element("i", `${piece.score < 0 ? "neg" : ""} ${piece.kept ? "" : "out"}`.trim(), piece.text);
    token.style.setProperty("--a", (0.9 * shade).toFixed(2));
    token.title = shortScore(piece.score) + (piece.kept ? "" : " (left out)");
    text.append(token);
  }
  if (unread) text.append(element("span", "unread", unread));
  const strongest = element("p", "strongest", "Strongest tokens: ");
  const best = pieces.filter((p) => p.kept && p.score > 0 && p.text.trim()).sort((a, b) => b.score - a.score);
  best.slice(0, STRONGEST).forEach((piece, i) => {
    strongest.append(i ? ", " : "", element("b", "", piece.text.trim()), ` ${shortScore(piece.score)}`);
  });
  return best.length ? [text, strongest] : [text];
}

function places() {
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) return new Map();
  return new Map([...$("list").children].slice(0, MOVES).map((li) => [li, li.getBoundingClientRect().top]));
}

function showMoves(before) {
  for (const li of [...$("list").children].slice(0, MOVES)) {
    const moved = before.has(li) ? before.get(li) - li.getBoundingClientRect().top : 0;
    if (moved) li.animate([{ transform: `translateY(${moved}px)` }, { transform: "none" }], { duration: 250, easing: "ease-out" });
  }
}

function show(kind) {
  const documents = parseDocuments($("documents").value).map(({ text }) => text);
  $("dialog-title").textContent = kind === "curl" ? "As a curl command" : "As Python";
  $("snippet").value = snippet(kind, location.origin, $("query").value, documents, Boolean($("key").value.trim()));
  $("copied").textContent = "";
  $("dialog").showModal();
}

async function copy() {
  $("snippet").select();
  try {
    await navigator.clipboard.writeText($("snippet").value);
    $("copied").textContent = "Copied.";
  } catch {
    $("copied").textContent = "The browser does not allow it here: the text is selected, press Ctrl C.";
  }
}

function download() {
  const { query, model, strategy, items } = run;
  const documents = items.map(({ peak, head_scores, ...item }) => item);
  const text = JSON.stringify({ query, model, strategy, documents }, null, 1);
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = "ranking.json";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

async function load(file) {
  if (!file) return;
  $("documents").value = await file.text();
  $("file").value = "";
  countDocuments();
}

const guarded = (work) => (...given) => {
  complain(null);
  Promise.resolve().then(() => work(...given)).catch(complain);
};
$("form").addEventListener("submit", (event) => { event.preventDefault(); rank(); });
$("form").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
});
$("documents").addEventListener("input", countDocuments);
$("documents").addEventListener("dragover", (event) => event.preventDefault());
$("documents").addEventListener("drop", guarded((event) => {
  if (!event.dataTransfer.files.length) return undefined;
  event.preventDefault();
  return load(event.dataTransfer.files[0]);
}));
$("file").addEventListener("change", guarded((event) => load(event.target.files[0])));
$("example").addEventListener("click", () => {
  [$("query").value, $("documents").value] = [EXAMPLE[0], EXAMPLE[1].join("\n")];
  countDocuments();
});
$("head").addEventListener("change", guarded(async () => {
  for (const { details, redraw } of run?.rows.values() ?? []) if (details.open) await redraw();
}));
$("stop").addEventListener("click", () => run?.stop.abort());
$("as-curl").addEventListener("click", guarded(() => show("curl")));
$("as-python").addEventListener("click", guarded(() => show("python")));
$("copy").addEventListener("click", copy);
$("close").addEventListener("click", () => $("dialog").close());
$("download").addEventListener("click", download);
learn().catch(() => { $("model").textContent = "enter the API key, and rank"; });
