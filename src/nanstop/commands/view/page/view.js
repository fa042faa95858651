
const { base, following, ended, lost } = document.body.dataset;
const runs = document.getElementById("runs");
const link = document.getElementById("link");
let source = null;
let wait = 1000;

function say(text, isLost) {
  if (link.textContent !== text) link.textContent = text;
  link.classList.toggle("lost", isLost);
}

function place(id, run) {
  let part = document.getElementById(id);
  if (part) return part;
  let section = document.getElementById(run);
  if (!section) {
    section = document.createElement("section");
    section.id = run;
    runs.append(section);
  }
  part = document.createElement("div");
  part.id = id;
  section.append(part);
  return part;
}

function show({ id, run, html }) {
  const part = place(id, run);
  const chosen = new Map([...part.querySelectorAll("details[id]")].map((one) => [one.id, one.open]));
  const held = part.contains(document.activeElement) ? document.activeElement : null;
  const at = held ? [...part.querySelectorAll(held.tagName)].indexOf(held) : -1;
  part.innerHTML = html;
  addCopies(part);
  for (const one of part.querySelectorAll("details[id]")) {
    if (chosen.has(one.id)) one.open = chosen.get(one.id);
  }
  if (held) part.querySelectorAll(held.tagName)[at]?.focus();
}

function keep(names) {
  for (const section of [...runs.children]) {
    if (!names.includes(section.id)) section.remove();
  }
}

function connect() {
  source = new EventSource(`${base}/events`);
  source.onopen = () => { wait = 1000; };
  source.addEventListener("part", (event) => show(JSON.parse(event.data)));
  source.addEventListener("runs", (event) => {
    keep(JSON.parse(event.data));
    say(following, false);
  });
  source.addEventListener("bye", () => say(ended, true));
  source.onerror = () => {
    source.close();
    if (![ended, lost].includes(link.textContent)) say(lost, true);
    setTimeout(connect, wait);
    wait = Math.min(wait * 1.5, 10000);
  };
}

connect();
