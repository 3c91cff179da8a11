"use strict";
const byId = (id) => document.getElementById(id);
const clock = (text) => new Date(text).toLocaleTimeString([], {hour12: false});
let skew = 0, shown = "";

function element(tag, content, name) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  made.append(...[content].flat());
  return made;
}
function span(seconds) {
  const left = Math.max(0, Math.round(seconds));
  const parts = [[86400, "d"], [3600, "h"], [60, "m"], [1, "s"]];
  let rest = left, text = "";
  for (const [size, unit] of parts) {
    const count = Math.floor(rest / size);
    rest -= count * size;
    if (count || (unit === "s" && !text)) text += count + unit;
  }
  return text;
}
async function send(action, content) {
  try {
    const answer = await fetch("/" + action, {
      method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(content),
    });
    byId("trouble").textContent = answer.ok ? "" : (await answer.json()).error;
    await refresh();
    return answer.ok;
  } catch (error) {
    byId("trouble").textContent = "The simulator does not answer: " + error.message;
    return false;
  }
}
function contentOf(form) {
  const content = {};
  for (const field of form.elements) {
    if (!field.name) continue;
    if (field.type === "checkbox") {
      if (field.checked !== field.defaultChecked) content[field.name] = field.checked;
    } else if (field.value.trim()) {
      const text = field.value.trim();
      if ("list" in field.dataset) content[field.name] = text.split(/[\s,]+/).filter(Boolean);
      else if (field.type === "number") content[field.name] = Number(text);
      else content[field.name] = field.name === "lasts" && text === "null" ? null : text;
    }
  }
  return content;
}
function eventCard(event) {
  const plan = event.plan;
  const status = event.status === "Gone" ? event.outcome : event.status;
  const head = element("h3", [plan.type, element("span", status, event.status)]);
  if (event.status === "Scheduled") {
    const left = element("span", "", "left");
    left.dataset.until = event.not_before_at;
    head.append(left);
  }
  const facts = [plan.source + ", for " + plan.vms.join(", ")];
  if (event.approved_at) facts.push("approved by " + event.approved_by + " at " + clock(event.approved_at));
  if (event.started_at) facts.push("started at " + clock(event.started_at));
  if (event.gone_at) facts.push("gone at " + clock(event.gone_at));
  facts.push(event.seen_by.length ? "seen by " + event.seen_by.join(", ") : "not yet seen by a VM");
  const card = element("section", [head, element("p", facts.join("; "))], "card");
  if (plan.description) card.append(element("p", plan.description, "soft"));
  card.append(element("p", [plan.name ? plan.name + " " : "", element("code", event.id)], "soft"));
  const actions = {Scheduled: ["approve", "cancel", "start", "end"], Started: ["end"], Gone: []}[event.status];
  if (actions.length) {
    card.append(element("div", actions.map((action) => {
      const button = element("button", action);
      button.type = "button";
      button.setAttribute("aria-label", action + " " + plan.type + " " + event.id.slice(0, 8));
      button.addEventListener("click", () => send(action, {event: event.id}));
      return button;
    }), "buttons"));
  }
  return card;
}
function vmCard(vm) {
  const faults = vm.faults.map((fault) => fault.kind + (fault.status ? " " + fault.status : "") + " on " + fault.on +
    (fault.count ? ", " + fault.count + " times" : "") + (fault.until ? ", until " + clock(fault.until) : ""));
  return element("section", [
    element("h3", [vm.name, element("span", vm.polls + " polls", "left soft")]),
    element("p", element("code", vm.endpoint)),
    ...faults.map((fault) => element("p", fault, "Started")),
  ], "card");
}
function show(state) {
  for (const list of document.querySelectorAll("select[data-choices]")) {
    if (!list.options.length) list.append(...state.choices[list.dataset.choices].map((word) => new Option(word)));
  }
  byId("about").textContent = "DocumentIncarnation " + state.incarnation +
    (state.speed === 1 ? "" : ", " + state.speed + " times as fast");
  byId("vms").replaceChildren(...state.vms.map(vmCard));
  const news = JSON.stringify([state.events, state.history]);
  if (news === shown) return;  // what is in focus stays in focus
  shown = news;
  const cards = state.events.map(eventCard);
  byId("events").replaceChildren(...(cards.length ? cards : [element("p", "none", "soft")]));
  byId("history").replaceChildren(...state.history.map((one) => element("li", [
    element("time", clock(one.at)), [one.kind, one.event && one.event.plan.type + " " + one.event.id, one.vm, one.text]
      .filter(Boolean).join("  "),
  ])));
}
async function refresh() {
  const state = await (await fetch("/state")).json();
  skew = new Date(state.now) - Date.now();
  show(state);
  countDown();
}
function countDown() {
  for (const left of document.querySelectorAll("[data-until]")) {
    left.textContent = "in " + span((new Date(left.dataset.until) - Date.now() - skew) / 1000);
  }
}
for (const id of ["schedule", "fault"]) {
  byId(id).addEventListener("submit", (submitted) => {
    submitted.preventDefault();
    send(id, contentOf(byId(id)));
  });
}
byId("clear").addEventListener("click", () => send("clear-faults", {}));
async function keepUp() {
  try {
    await refresh();
    document.body.dataset.state = "live";
  } catch (error) {
    document.body.dataset.state = "lost";
    byId("about").textContent = "The simulator does not answer; is it still running?";
  }
  setTimeout(keepUp, 1000);
}
keepUp();
