// Finds entries by words: each word of the query must begin a word of the title or of the text.
const field = document.getElementById("q");
const list = document.getElementById("found");
const all = document.getElementById("all");
const ORDER = ["symptom", "code", "drill", "rule", "manual", "explainer", "topic", "card", "claim"];
const FILLERS = new Set(["the", "a", "an", "is", "are", "my", "our", "why", "it", "and", "of"]);

function wordsOf(text) {
  return text.toLowerCase().split(/[^a-z0-9]+/).filter((w) => w && !FILLERS.has(w));
}

function scoreEntry([kind, title, , text, words], query) {
  const titleWords = wordsOf(title);
  const textWords = wordsOf(`${words} ${text}`);
  let score = 0;
  for (const word of query) {
    if (titleWords.includes(word)) score += 6;
    else if (titleWords.some((w) => w.startsWith(word))) score += 4;
    else if (textWords.includes(word)) score += 2;
    else if (textWords.some((w) => w.startsWith(word))) score += 1;
    else return 0;
  }
  const place = ORDER.indexOf(kind);
  return score + (place < 0 ? 0 : (ORDER.length - place) / ORDER.length);
}

function showResults() {
  const query = wordsOf(field.value);
  const scored = ENTRIES.map((entry) => [scoreEntry(entry, query), entry]);
  const found = scored.filter(([score]) => score > 0).sort((a, b) => b[0] - a[0]).slice(0, 40);
  all.hidden = query.length > 0;
  list.hidden = query.length === 0;
  list.replaceChildren(...found.map(([, entry]) => renderEntry(entry)));
  if (query.length > 0 && found.length === 0) {
    const item = document.createElement("li");
    item.textContent = "Nothing has all of these words. Try fewer.";
    list.append(item);
  }
}

function renderEntry([kind, title, link, text]) {
  const item = document.createElement("li");
  const label = document.createElement("small");
  label.textContent = kind;
  const anchor = document.createElement("a");
  anchor.href = link;
  anchor.textContent = title;
  item.append(label, anchor);
  if (text) {
    const summary = document.createElement("p");
    summary.textContent = text.slice(0, 180) + (text.length > 180 ? "…" : "");
    item.append(summary);
  }
  return item;
}

field.addEventListener("input", showResults);
field.value = new URLSearchParams(location.search).get("q") ?? "";
showResults();
