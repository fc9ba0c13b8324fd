// The Markdown that models write, as DOM nodes: text never becomes markup.

export function render(text) {
  const fragment = document.createDocumentFragment();
  const lines = text.split("\n");
  let at = 0;
  while (at < lines.length) {
    const [node, next] = block(lines, at);
    if (node) fragment.append(node);
    at = next;
  }
  return fragment;
}

// Returns the node of the block that starts at a line, and the line after it.
function block(lines, at) {
  const line = lines[at];
  if (!line.trim()) return [null, at + 1];
  const fence = line.match(/^\s*(```+|~~~+)\s*([\w+#.-]*)/);
  if (fence) return code(lines, at, fence);
  const heading = line.match(/^(#{1,6})\s+(.*)/);
  if (heading) return [element(`h${Math.min(heading[1].length + 2, 6)}`, heading[2]), at + 1];
  if (/^\s*([-*_])(\s*\1){2,}\s*$/.test(line)) return [document.createElement("hr"), at + 1];
  if (itemOf(line)) return list(lines, at);
  if (/^\s*>/.test(line)) return quote(lines, at);
  return paragraph(lines, at);
}

function code(lines, at, [, mark, language]) {
  const rest = lines.slice(at + 1);
  const length = rest.findIndex((line) => line.trim().startsWith(mark));
  const inside = length < 0 ? rest : rest.slice(0, length); // not closed yet while it is streamed
  const pre = document.createElement("pre");
  const node = document.createElement("code");
  node.textContent = inside.join("\n");
  pre.append(node);
  pre.tabIndex = 0;
  if (language) pre.dataset.language = language;
  return [pre, at + inside.length + 2];
}

function itemOf(line) {
  return line.match(/^\s*(?:([-*+])|(\d{1,9})[.)])\s+(.*)/);
}

function list(lines, at) {
  const first = itemOf(lines[at]);
  const node = document.createElement(first[1] ? "ul" : "ol");
  if (first[2]) node.start = Number(first[2]);
  for (; at < lines.length; at++) {
    const item = itemOf(lines[at]);
    if (item && Boolean(item[1]) !== Boolean(first[1])) break;
    if (item) node.append(element("li", item[3]));
    else if (!lines[at].trim() && itemOf(lines[at + 1] ?? "")) continue;
    else if (/^\s+\S/.test(lines[at])) node.lastChild.append(" ", ...inline(lines[at].trim()));
    else break;
  }
  return [node, at];
}

function quote(lines, at) {
  const inside = [];
  for (; at < lines.length && /^\s*>/.test(lines[at]); at++) {
    inside.push(lines[at].replace(/^\s*>\s?/, ""));
  }
  const node = document.createElement("blockquote");
  node.append(render(inside.join("\n")));
  return [node, at];
}

function paragraph(lines, at) {
  const start = at++;
  const endsIt = (line) => !line.trim() || /^\s*(```|~~~|#{1,6}\s|>)/.test(line) || itemOf(line);
  while (at < lines.length && !endsIt(lines[at])) at++;
  const node = document.createElement("p");
  lines.slice(start, at).forEach((line, index) => {
    if (index) node.append(document.createElement("br"));
    node.append(...inline(line));
  });
  return [node, at];
}

const INLINE = /`([^`]+)`|\*\*(.+?)\*\*|\*([^*\s](?:[^*]*[^*\s])?)\*/g;

function inline(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    if (match.index > end) nodes.push(text.slice(end, match.index));
    const [whole, codeText, strong, emphasis] = match;
    if (codeText !== undefined) {
      const node = document.createElement("code");
      node.textContent = codeText;
      nodes.push(node);
    } else nodes.push(element(strong === undefined ? "em" : "strong", strong ?? emphasis));
    end = match.index + whole.length;
  }
  nodes.push(text.slice(end));
  return nodes;
}

function element(name, text) {
  const node = document.createElement(name);
  node.append(...inline(text));
  return node;
}
