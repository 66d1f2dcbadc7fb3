// Pure parts of the page: reading documents, cutting text at tokens, numbers, and code to copy.

// Documents of a text: one a line, JSON where a line begins with "{"; blank lines are left out.
export function parseDocuments(text) {
  const documents = [];
  text.split(/\r?\n/).forEach((line, i) => {
    if (!line.trim()) return;
    if (!line.trimStart().startsWith("{")) {
      documents.push({ text: line });
      return;
    }
    let row;
    try {
      row = JSON.parse(line);
    } catch {
      throw new Error(`Line ${i + 1} begins like JSON and is none.`);
    }
    if (typeof row.text !== "string") throw new Error(`Line ${i + 1} has no "text".`);
    const id = row._id ?? row.id;
    documents.push({ text: row.text, title: row.title || undefined, id: id === undefined ? undefined : String(id) });
  });
  return documents;
}

const JOINED = /^[\p{M}\u200d\u{1f3fb}-\u{1f3ff}]/u;

// Cuts a ranked document's text at its tokens, never inside a character that is drawn as one.
// Offsets count code points, as Python does. Tokens that share characters become one piece.
export function piecesOf(item) {
  const text = Array.from(item.title ? `${item.title}\n${item.text}` : item.text);
  const spans = [];
  const tokens = [...(item.token_scores || [])].sort((a, b) => a.start - b.start || a.end - b.end);
  for (const { start, end, score, kept } of tokens) {
    const last = spans.at(-1);
    const inside = last && (start < last.end || end <= start);
    const joined = last && (JOINED.test(text[start] ?? "") || text[start - 1] === "\u200d");
    if (inside || joined) {
      last.end = Math.max(last.end, end);
      last.score += score;
      last.kept ||= kept;
    } else if (end > start) {
      spans.push({ start, end, score, kept });
    }
  }
  const pieces = [];
  let read = 0;
  for (const span of spans) {
    let { start } = span;
    while (start < span.end - 1 && /\s/.test(text[start])) start += 1;
    if (read < start) pieces.push({ text: text.slice(read, start).join("") });
    pieces.push({ text: text.slice(start, span.end).join(""), score: span.score, kept: span.kept });
    read = span.end;
  }
  return { pieces, unread: text.slice(read).join("") };
}

// The item with the scores of one head in place of those of all; none of its tokens are left out.
export function ofHead(item, head) {
  const scores = item.head_scores?.[head] ?? [];
  const token_scores = (item.token_scores || []).map((token, i) => ({ ...token, score: scores[i] ?? 0, kept: true }));
  return { ...item, token_scores };
}

// Each head with what it gives the whole document, the most telling first.
export function headSums(item) {
  const sums = Object.entries(item.head_scores || {}).map(([head, scores]) => [head, scores.reduce((a, b) => a + b, 0)]);
  return sums.sort((a, b) => Math.abs(b[1]) - Math.abs(a[1]));
}

// Four significant digits, with a true minus sign.
export function shortScore(score) {
  const text = Math.abs(score) >= 1e-4 || score === 0 ? Number(score.toPrecision(4)).toString() : score.toExponential(2);
  return text.replace("-", "\u2212");
}

// The same request as a shell command or as Python.
export function snippet(kind, origin, query, documents, withKey) {
  const body = { query, documents, return_documents: false };
  if (kind === "curl") {
    const data = JSON.stringify(body).replaceAll("'", "'\\''");
    const key = withKey ? ` \\\n  -H "Authorization: Bearer $KEY"` : "";
    return `curl -s ${origin}/v1/rerank \\\n  -H 'Content-Type: application/json'${key} \\\n  -d '${data}'\n`;
  }
  const list = documents.map((text) => `    ${JSON.stringify(text)},\n`).join("");
  const key = withKey ? `, headers={"Authorization": f"Bearer {key}"}` : "";
  return [
    "import httpx\n\n",
    `documents = [\n${list}]\n`,
    `body = {"query": ${JSON.stringify(query)}, "documents": documents}\n`,
    withKey ? 'key = "..."\n' : "",
    `answer = httpx.post("${origin}/v1/rerank", json=body, timeout=60${key}).json()\n`,
    'for result in answer["results"]:\n',
    '    print(result["relevance_score"], documents[result["index"]])\n',
  ].join("");
}
