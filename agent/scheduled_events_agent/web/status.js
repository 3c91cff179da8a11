// Shows the agent's answers at status and history, and keeps them up to date.
// Every text becomes a text node and never markup. Only changed parts are replaced: elements that a reader has
// opened, selected or focused stay.
"use strict";
(() => {
  const REFRESH_MS = 2000, HIDDEN_REFRESH_MS = 10000, TIMEOUT_MS = 4000, TICK_MS = 250, COPIED_MS = 2000;
  const LOST_MS = 6000, HIDDEN_LOST_MS = 20000;
  const CLOCK_ANSWERS = 10;
  const MOST = {events: 50, resources: 12, names: 40, records: 40, characters: 600, inName: 80, ofOutput: 2000, lines: 3};
  const LEVELS = {act: "bad", fix: "busy"};
  const BUSY_PHASES = ["preparing", "started", "recovering"];
  const STARTS_AT_DEADLINE = ["prepare_failed", "approval_needed", "approval_failing", "restart_unsafe"];
  const SIGNS = {good: "✓", busy: "▸", bad: "✕", unknown: "?"};
  const COLORS = {good: "#15803d", busy: "#b45309", bad: "#b91c1c", unknown: "#4b5563"};
  const ICONS = {
    "✓": "<circle cx='8' cy='8' r='8'/><path d='M4 8.5l3 3 5-7'",
    "▸": "<circle cx='8' cy='8' r='8'/><path d='M6 4l5 4-5 4'",
    "?": "<circle cx='8' cy='8' r='8'/><path d='M5.7 6.3a2.3 2.3 0 1 1 3.4 2c-.8.5-1.1.9-1.1 1.6m0 1.5v1'",
    "!": "<path d='M8 0l8 16H0z'/><path d='M8 5v5.5m0 1.5v2'",
    "✕": "<rect width='16' height='16' rx='2'/><path d='M4 4l8 8m0-8l-8 8'",
  };
  const STAGES = {prepare: "prepare", on_start: "on start", recover: "recover"};
  const STEPS = {
    done: ["good", "✓", "done"], running: ["busy", "▸", "running"],
    queued: ["busy", "…", "waits for another run"], failed: ["bad", "✕", "failed"],
    resolved: ["", "✓", "resolved by an operator"], open: ["", "·", "to do"], not_run: ["", "-", "not run"],
  };
  const OPERATORS = {approve: ["approved", "at"], hold: ["held", "since"]};
  const SOURCES = {User: "a user", Platform: "Azure's platform"};
  const WHOM = {
    self: "this VM alone", shared: "this VM and others", others: "other VMs only",
    unknown: "it is not known whether this VM",
  };
  const BAD_OUTCOMES = ["failed", "timed_out", "not_started"];
  const BAD_KINDS = [
    "held", "approval_failed", "approval_needed", "hook_missing", "recovery_failed", "reload_rejected", "state_lost",
    "state_recreated", "unprepared", "vm_unknown",
  ];

  const main = document.getElementById("main");
  let status = null, histories = null, unread = "", copied = "";
  const openedAt = new Date().toISOString();
  let answered = performance.now(), hasFailed = false, isLost = false;
  // How far this browser's clock is ahead of the agent's: the quickest of the last answers is the most exact.
  const gaps = [];
  let ahead = 0;

  // --- pieces

  const el = (tag, attributes, ...children) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) if (value) node.setAttribute(name, value);
    node.append(...children.flat(Infinity).filter((child) => child !== "" && child !== null));
    return node;
  };
  const cut = (text, limit) =>
    text.length <= limit ? text : `${text.slice(0, limit)}… (${text.length.toLocaleString("en")} characters)`;
  // A mark that turns the direction of writing is kept to its own text.
  const words = (text, limit = MOST.characters) => {
    const shown = cut(text || "", limit);
    return /[^\x00-\x7f]/.test(shown) ? el("bdi", {}, shown) : shown;
  };
  const code = (text) => el("code", {}, words(text));
  const mark = (sign) => (sign ? [el("span", {"aria-hidden": "true"}, sign), " "] : "");
  const chip = (word, level, sign = SIGNS[level]) =>
    el("span", {class: `chip ${level}`}, mark(sign), words(word, MOST.inName));
  const more = (count, what, tag = "p") =>
    count > 0 ? el(tag, {class: "quiet"}, `… ${count.toLocaleString("en")} more ${what}`) : "";
  const list = (facts) =>
    el("dl", {}, facts.filter(([, value]) => value !== "").map(
      ([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  const section = (id, title, ...content) =>
    el("section", {"aria-labelledby": id}, el("h2", {id}, title), content);
  // A key may be any text. This makes an id of it, different for each.
  const idOf = (key) => key.replace(/[^A-Za-z0-9-]/g, (one) => `_${one.charCodeAt(0).toString(16)}`);
  const separated = (nodes) => nodes.flatMap((node, i) => (i ? [", ", node] : [node]));

  // --- times

  const span = (ms) => {
    const seconds = Math.max(0, Math.floor(ms / 1000)), minutes = Math.floor(seconds / 60);
    const hours = Math.floor(seconds / 3600), days = Math.floor(seconds / 86400);
    if (days) return `${days}d ${hours % 24}h`;
    if (hours) return `${hours}h ${minutes % 60}m`;
    return minutes ? `${minutes}m ${seconds % 60}s` : `${seconds}s`;
  };
  const rounded = (ms) => span(ms).replace(/ 0[smh]$/, "");
  const now = () => Date.now() - ahead;
  // As messages.hook_time.
  const hookTime = ({since: begin, until: end}) => {
    const limit = end && rounded(Date.parse(end) - Date.parse(begin));
    return [since(begin), limit ? ` of at most ${limit}` : " so far"];
  };
  const iso = (at) => `${at.slice(0, 19)}Z`;
  const stamp = (at) => `${at.slice(0, 10)} ${at.slice(11, 19)} UTC`;
  const timeNow = () => new Date(now()).toISOString();
  const isToday = (at) => at.slice(0, 10) === timeNow().slice(0, 10);
  const clock = (at) => (isToday(at) ? stamp(at).slice(11) : stamp(at));
  const LOCAL = new Intl.DateTimeFormat([], {dateStyle: "medium", timeStyle: "long"});
  const time = (at, text, attributes = {}) =>
    el("time", {datetime: iso(at), title: `${LOCAL.format(new Date(at))}, your time`, ...attributes}, text);
  const moment = (at) => time(at, clock(at));
  const dated = (at) => time(at, stamp(at));
  // Screen readers do not read running times again each second.
  const until = (at) => time(at, span(Date.parse(at) - now()), {"data-until": at, role: "timer"});
  const since = (at) => time(at, span(now() - Date.parse(at)), {"data-since": at, role: "timer"});
  const tick = () => {
    for (const one of main.querySelectorAll("time[data-until],time[data-since],time[data-now]")) {
      const {until: end, since: start} = one.dataset;
      let text = clock(timeNow());
      if (end) text = span(Date.parse(end) - now());
      if (start) text = span(now() - Date.parse(start));
      if (one.textContent !== text) one.textContent = text;
    }
  };

  // --- header and what needs attention

  const vmName = () => (status.vm.names.length ? status.vm.names[0] : "this VM");

  const signOf = ({severity, kind}) => (severity === "act" && kind !== "approval_needed" ? "✕" : "!");
  const phaseOf = ({phase}) => (phase === "waiting" ? "pending" : phase.replaceAll("_", " "));

  // The state of the agent, for the title, the icon and the first chip.
  const state = () => {
    const {condition, attention: [first], events: [event]} = status;
    const level = LEVELS[condition] || condition;
    let sign = SIGNS[level], word = "";
    if (first) {
      sign = signOf(first);
      word = first.kind.replaceAll("_", " ").replace("vm ", "VM ");
    } else if (condition === "busy") {
      word = phaseOf(event);
    }
    return {sign, level, word};
  };

  const top = () => {
    const {sign, level, word} = state();
    const chips = isLost ? [] : [word && chip(word, level, sign), chip(status.ready ? "ready" : "not ready", "", ""),
      status.mode === "observe" ? chip("only observes", "", "○") : ""];
    return el("header", {}, el("h1", {}, words(vmName())), el("p", {class: "chips"}, chips),
      el("p", {class: "now"}, time(timeNow(), clock(timeNow()), {"data-now": "yes", role: "timer"})));
  };

  const commands = (all, prefix) => el("ul", {class: "commands", "aria-live": "off"}, all.map(({command, effect}) => {
    const line = command.startsWith("scheduled-events-agent ") ? `${prefix}${command}` : command;
    return el("li", {}, el("pre", {}, words(line, MOST.ofOutput)), el("p", {}, words(effect)),
      el("button", {type: "button", "data-copy": line}, copied === line ? "Copied" : "Copy"));
  }));

  const block = (id, severity, sign, message, ...rest) =>
    el("section", {id, class: `attention ${severity}`, role: severity === "act" ? "alert" : "status"},
      el("h2", {}, mark(sign), message), rest);

  const lost = () => {
    if (!isLost) return "";
    const last = status ? status.at : openedAt, follows = status ? " What follows is from then." : "";
    return block("lost", "act", "✕",
      ["The agent has not answered since ", moment(last), " (", since(last), ` ago).${follows}`],
      status && commands(status.supervisor_commands, ""));
  };

  const deadline = ({severity, kind, event_id, deadline: at}) => {
    const startsAtAnyMoment = STARTS_AT_DEADLINE.includes(kind) || (kind === "vm_unknown" && event_id);
    if (severity !== "act" || !(at || startsAtAnyMoment)) return "";
    if (!at || Date.parse(at) <= now()) return el("p", {class: "deadline"}, "It may start ", el("b", {}, "at any moment"));
    return el("p", {class: "deadline"}, el("b", {}, until(at)), " left, until ", moment(at));
  };

  const isLink = (text) => /^https?:/.test(text);
  const runbook = ({kind, runbook: place}) =>
    isLink(place) ? el("a", {href: place}, `Runbook: ${kind}`) : ["Runbook, on this VM: ", code(place)];

  // The last lines that the failed hook of this event wrote, where the policy shows output.
  const failedOutput = ({kind, key}) => {
    const stage = {prepare_failed: "prepare", recovery_failed: "recover"}[kind];
    if (!stage) return "";
    const {hooks} = status.events.find((event) => event.key === key);
    const failed = hooks.find((hook) => hook.stage === stage && hook.failure && hook.output);
    if (!failed) return "";
    const lines = failed.output.split("\n").filter((line) => line.trim());
    return el("pre", {class: "output"}, words(lines.slice(-MOST.lines).join("\n"), MOST.ofOutput));
  };

  const attention = () => {
    const shown = status.attention.slice(0, MOST.events);
    const isLike = (one, other) => one.kind === other.kind && one.key === other.key;
    return [
      shown.map((one, i) => {
        const number = shown.slice(0, i).filter((other) => isLike(one, other)).length;
        return block(`a-${idOf(`${one.kind} ${one.key} ${number}`)}`, one.severity, signOf(one), words(one.message),
          failedOutput(one), one.consequence && el("p", {}, words(one.consequence)), deadline(one),
          one.detail && el("pre", {class: "detail"}, words(one.detail, MOST.ofOutput)),
          commands(one.commands, status.command_prefix),
          el("p", {}, runbook(one)));
      }),
      more(status.attention.length - shown.length, "need an operator; /status has them all"),
    ];
  };

  const headline = () => {
    if (isLost || status.attention.length) return "";
    const polled = status.last_poll_at ? ["Last successful poll ", since(status.last_poll_at), " ago"] : "No successful poll yet";
    const {sign, level} = state();
    return el("div", {class: `headline ${level}`},
      el("p", {role: "status"}, mark(sign), words(status.headline)),
      el("p", {class: "polled"}, status.ready ? "" : "/readyz answers 503. ", polled));
  };

  // --- the agent

  const runningAlone = () => {
    const hooks = status.on_clear.map((hook) =>
      el("li", {}, chip(hook.state, "busy", STEPS[hook.state][1]), " the on_clear hook ",
        el("b", {}, words(hook.hook, MOST.inName)), ", ", hookTime(hook)));
    return hooks.length ? el("ul", {class: "alone"}, hooks) : "";
  };

  const notifications = () => {
    const lines = status.notify.slice(0, MOST.names).map(({name, waiting, failure, lost: count, lost_at, lost_reason}) => {
      const parts = [
        failure ? ["fails since ", moment(failure.since), ": ", words(failure.reason)] : "",
        waiting ? `${waiting} waiting` : "",
        count ? [`${count} lost since `, moment(lost_at), ": ", words(lost_reason)] : "",
      ].filter((part) => part !== "");
      return el("div", {}, words(name, MOST.inName), ": ", parts.length ? parts.flatMap((part, i) => (i ? ["; ", part] : part)) : "nothing waits");
    });
    return lines.length ? [lines, more(status.notify.length - MOST.names, "targets")] : "";
  };

  const agent = () => {
    const {policy, vm, rules, fleet} = status;
    const isUnknown = status.condition === "unknown" || status.polls !== "current";
    const health = status.health !== "ok" ? "not healthy, see above" : isUnknown ? "not known yet" : "ok";
    const acts = status.mode === "act" ? "acts" : "only observes: runs no hooks, approves nothing";
    const hash = policy.hash ? [", SHA-256 ", el("code", {}, policy.hash.slice(0, 12))] : "";
    const changed = policy.changed_at
      ? ["; changed at ", moment(policy.changed_at), ", not loaded: reload"] : "";
    const lines = policy.rejected.split("\n");
    const rejected = policy.rejected ? el("div", {}, "The file as it is now was rejected:",
      el("pre", {}, words(lines.slice(0, MOST.names).join("\n"), 4000)), more(lines.length - MOST.names, "lines")) : "";
    const failure = status.poll_failure ? ["; since then: ", words(status.poll_failure)] : "";
    const unavailable = status.recommendations_failure
      ? ["; ", words(status.recommendations_failure)] : "";
    const listed = (names) => separated(names.slice(0, MOST.names).map((name) => words(name, MOST.inName)));
    return el("section", {class: "card", "aria-labelledby": "agent"}, el("h2", {id: "agent"}, "Agent"), list([
      ["Health", health],
      ["Ready", status.ready ? "yes" : "no: /readyz answers 503"],
      ["Last successful poll", [status.last_poll_at ? [since(status.last_poll_at), " ago"] : "never yet", failure]],
      ["Endpoint", code(status.endpoint)],
      ["api-version", [code(status.api_version), unavailable]],
      ["Incarnation", words(status.incarnation) || "no document yet"],
      ["This VM", vm.names.length ? listed(vm.names) : "name not known yet"],
      ["VM id", vm.vm_id ? code(vm.vm_id) : ""],
      ["Mode", acts],
      ["Policy", [code(policy.file), ", read ", moment(policy.read_at), hash, changed, rejected]],
      ["Needs a restart", policy.needs_restart.length ? listed(policy.needs_restart) : ""],
      ["Notifications", notifications()],
      ["Fleet", fleet ? ["group ", words(fleet.group, MOST.inName) || "not known", fleet.not_ready.length
        ? ["; waits for ", listed(fleet.not_ready), more(fleet.not_ready.length - MOST.names, "VMs", "span")] : "",
        fleet.error ? ["; the store cannot be used: ", words(fleet.error)] : "",
        fleet.warnings.map((text) => ["; ", words(text)])] : ""],
      ["Rules", rules.length ? [listed(rules), more(rules.length - MOST.names, "rules", "span")] : "none"],
      ["History", unread ? ["cannot be shown: ", words(unread)] : ""],
      ["Version", ["scheduled-events-agent ", words(status.version), ", started ", moment(status.started_at)]],
    ]));
  };

  // --- events

  const countdown = ({type, status: state, not_before: at, outcome}) => {
    const count = (big, small) => el("p", {class: "count"}, el("b", {}, big), el("small", {}, small));
    if (outcome) return count("over", "at Azure");
    if (type === "SpotRebalanceRecommendation") return count("a warning", "an eviction may follow");
    if (state === "Started") return count("started", "by Azure");
    if (!at || Date.parse(at) <= now()) return count("any moment", "it may start");
    return count(until(at), `until it may start, ${clock(at)}`);
  };

  const approval = ({approval: {state, failures, text}}) => {
    if (state === "confirmed") return [chip("approved", "good"), " ", words(text)];
    if (state === "requested") return [chip("asking", "busy"), " ", words(text)];
    return failures ? [chip("failing", "bad"), " ", words(text)] : words(text);
  };

  // As messages.operator_message.
  const operator = ({operator: {action, by, at}}) => {
    if (!action) return "";
    const [done, preposition] = OPERATORS[action];
    return [`${done} by `, words(by) || "an operator", ` ${preposition} `, moment(at)];
  };

  const hooks = (event) => {
    const stages = Object.entries(STAGES).map(([stage, title]) => {
      const all = event.hooks.filter((hook) => hook.stage === stage);
      const steps = all.slice(0, MOST.names).map(({hook, state}) => {
        const [level, sign, meaning] = STEPS[state];
        return el("li", {class: level}, el("span", {"aria-hidden": "true"}, sign), " ", words(hook, MOST.inName), " ",
          el("span", {class: "quiet"}, meaning));
      });
      return steps.length ? el("div", {class: "stage"}, el("span", {class: "quiet"}, title),
        el("ol", {class: "steps"}, steps, more(all.length - MOST.names, "hooks", "li"))) : "";
    });
    const failures = event.hooks.filter(({failure}) => failure)
      .map(({failure}) => el("p", {class: "bad"}, words(failure)));
    return event.hooks.length ? [stages, failures] : "";
  };

  const resources = (event) => {
    const plain = (name) => name.toLowerCase().replace(/^_/, "");
    const own = new Set(status.vm.names.map(plain)), isOwn = (name) => own.has(plain(name));
    const names = [...event.resources].sort((one, two) => isOwn(two) - isOwn(one));
    const shown = names.slice(0, MOST.resources).map((name) =>
      isOwn(name) ? el("b", {}, words(name, MOST.inName)) : words(name, MOST.inName));
    const rest = names.length - shown.length;
    const whom = WHOM[event.affects];
    return shown.length ? [`${whom}: `, separated(shown), rest ? `, and ${rest} more` : ""] : whom;
  };

  const about = (event) => {
    const length = event.duration_seconds === null ? "" : `, about ${rounded(1000 * Math.ceil(event.duration_seconds))} long`;
    return list([
      ["From", [words(SOURCES[event.source] || event.source || "unknown"), length]],
      ["Decision", words(event.reason)],
      ["Id", event.id ? code(event.id) : code("none")],
      ["First seen", [moment(event.seen_at), ", ", since(event.seen_at), " ago"]],
    ]);
  };

  const availableActions = (event) => {
    const shown = new Set(status.attention.flatMap((one) => one.commands.map(({command}) => command)));
    const others = event.commands.filter(({command}) => !shown.has(command));
    return others.length ? el("p", {class: "hint"}, "To overrule: ",
      others.flatMap(({command}, i) => [i ? " or " : "", code(`${status.command_prefix}${command}`)])) : "";
  };

  const card = (event, history, isFirst) => {
    const id = idOf(event.key), name = `e-${id}`;
    const needs = status.attention.find(({key}) => key === event.key);
    const phaseLevel = BUSY_PHASES.includes(event.phase) ? "busy" : "";
    const level = needs ? LEVELS[needs.severity] : phaseLevel;
    return el("article", {id: `c-${id}`, class: `card ${level}`, "aria-labelledby": name},
      el("div", {class: "lead"},
        el("div", {}, el("h3", {id: name}, words(event.type) || "An event without a type"),
          chip(phaseOf(event), level, needs ? signOf(needs) : SIGNS[level])),
        countdown(event)),
      list([
        ["Now", words(event.activity)],
        ["Approval", approval(event)],
        ["Operator", operator(event)],
        ["Hooks", hooks(event)],
        ["Affects", resources(event)],
        ["Description", event.description ? el("q", {}, words(event.description)) : ""],
      ]),
      availableActions(event),
      history ? el("details", {id: `t-${id}`, open: isFirst && "open"},
        el("summary", {}, "Timeline (UTC)"), timeline(history)) : "",
      el("details", {id: `m-${id}`}, el("summary", {}, "More"), about(event)));
  };

  const pending = () => {
    if (!status.events.length) return "";  // the headline says so
    const known = new Map(pastAndPresent().map((history) => [history.event.key, history]));
    const cards = status.events.slice(0, MOST.events).map((event, i) => card(event, known.get(event.key), !i));
    const title = ["Pending ", el("small", {}, `${status.events.length}`)];
    return section("pending", title, cards, more(status.events.length - cards.length, "are pending; /status has them all"));
  };

  // --- history

  // The last events. (A record about the agent has none.)
  const pastAndPresent = () => (histories || []).filter(({event}) => event);
  const agentRecords = () => (histories || []).filter(({event}) => !event).flatMap(({records}) => records);

  // The event's records, and among them those about the agent from its time. As in the command history.
  const merged = ({event, records}) => {
    const last = records.at(-1);
    const end = last && last.kind === "closed" ? Date.parse(last.at) : Infinity;
    const others = agentRecords().filter(({at}) =>
      Date.parse(at) >= Date.parse(event.seen_at) && Date.parse(at) <= end);
    const all = [];
    for (const one of records) {
      while (others.length && Date.parse(others[0].at) < Date.parse(one.at)) all.push(others.shift());
      all.push(one);
    }
    return [...all, ...others];
  };

  const record = (one, isSameDay) => {
    const isBad = BAD_OUTCOMES.includes(one.outcome) || BAD_KINDS.includes(one.kind);
    const level = isBad ? "bad" : one.outcome === "succeeded" || one.kind === "approved" ? "good" : "";
    const output = one.detail.length > MOST.ofOutput ? `…${one.detail.slice(-MOST.ofOutput)}` : one.detail;
    const text = one.key ? one.text : [one.kind.replaceAll("_", " "), one.text].filter(Boolean).join(": ");
    return el("li", {class: level},
      time(one.at, [isSameDay ? "" : [one.at.slice(0, 10), el("br", {})], one.at.slice(11, 19)]),
      el("div", {}, words(text), output ? el("pre", {}, output) : ""));
  };

  // The records, oldest first; of many, the last ones. The first of each day has its date, but for today.
  const timeline = (history) => {
    const all = merged(history), records = all.slice(-MOST.records);
    const days = [timeNow(), ...records.map((one) => one.at)].map((at) => at.slice(0, 10));
    const isHidden = records.some((one) => one.kind === "hook_finished" && !one.detail);
    const command = `${status.command_prefix}scheduled-events-agent history --event ${history.event.id} ${status.command_options.state}`;
    return [
      el("ol", {class: "timeline"},
        all.length > records.length ? el("li", {class: "quiet"}, "… there are earlier records") : "",
        records.map((one, i) => record(one, days[i] === days[i + 1]))),
      isHidden ? el("p", {class: "hint"}, "With what the hooks wrote: ", code(command.trim())) : "",
    ];
  };

  const outcome = ({outcome: word, phase, hooks}) => {
    const recover = hooks.filter(({stage}) => stage === "recover");
    if (recover.some(({state}) => state === "resolved")) return chip(`${word}, resolved by an operator`, "");
    const hasFailed = recover.some(({failure}) => failure);
    return hasFailed ? chip(`${word || phase}, a recover hook failed`, "busy", "!") : chip(word || phase, "");
  };

  const past = () => {
    const open = new Set(status.events.map(({key}) => key));
    const over = pastAndPresent().filter(({event}) => !open.has(event.key)).reverse();
    const items = over.map((history, i) => {
      const {event, records} = history;
      const took = records.length ? `, ${span(Date.parse(records.at(-1).at) - Date.parse(event.seen_at))} long` : "";
      return el("details", {id: `t-${idOf(event.key)}`, open: !status.events.length && !i && "open"},
        el("summary", {}, el("b", {}, words(event.type) || "event"), " ",
          outcome(event), " ",
          el("span", {}, dated(event.seen_at), took)),
        el("p", {}, words(event.reason)),
        el("p", {class: "quiet"}, code(event.id), " ", words(event.description)),
        el("p", {class: "quiet"}, "Timeline (UTC)"), timeline(history));
    });
    return items.length ? section("recent", "Recent events", items) : "";
  };

  const pauses = () => {
    const notes = agentRecords().filter(({kind}) => kind === "machine_paused").reverse().slice(0, MOST.records);
    const lines = notes.map((one) => el("li", {}, dated(one.at), el("div", {}, words(one.text))));
    return lines.length ? section("pauses", "VM pauses", el("ol", {class: "timeline wide"}, lines)) : "";
  };

  const footer = () => {
    const link = (name) => el("a", {href: name}, `/${name}`);
    return el("footer", {}, el("p", {}, "As JSON: ", link("status"), ", ", link("history"), ". For programs: ",
      link("metrics"), ", ", link("healthz"), ", ", link("readyz"), "."));
  };

  // --- the page

  // Change the old element to look like the fresh one, and keep as much of it as possible.
  const sync = (old, fresh) => {
    if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName || old.id !== fresh.id) {
      old.replaceWith(fresh);
      return;
    }
    if (old.nodeType === Node.TEXT_NODE) {
      if (old.data !== fresh.data) old.data = fresh.data;
      return;
    }
    for (const name of old.getAttributeNames())
      if (name !== "open" && !fresh.hasAttribute(name)) old.removeAttribute(name);
    for (const name of fresh.getAttributeNames())
      if (name !== "open" && old.getAttribute(name) !== fresh.getAttribute(name))
        old.setAttribute(name, fresh.getAttribute(name));
    // An element with an id is found again wherever it is.
    const after = [...fresh.childNodes], wanted = new Set(after.map((node) => node.id).filter(Boolean));
    for (const child of [...old.children]) if (child.id && !wanted.has(child.id)) child.remove();
    after.forEach((node, i) => {
      const at = old.childNodes[i] || null, same = node.id && [...old.children].find((one) => one.id === node.id);
      if (same) {
        if (same !== at) old.insertBefore(same, at);
        sync(same, node);
      } else if (!at || node.id || wanted.has(at.id)) old.insertBefore(node, at);
      else sync(at, node);
    });
    while (old.childNodes.length > after.length) old.lastChild.remove();
  };

  const parts = () => [runningAlone(), pending(), past(), pauses(), agent(), footer()];

  const draw = () => {
    if (!status && !isLost) return;
    const fresh = status ? [top(), lost(), headline(), attention(), ...parts()] : ["", lost()];
    // The first two parts show the present, the others the last answer.
    const isStale = (i) => isLost && i > 1;
    const isBusy = status && !histories && !unread;
    const page = el("main", {id: "main", "aria-busy": isBusy && "true"}, fresh.map((part, i) =>
      el("div", {id: `part-${i}`, class: isStale(i) && "stale"}, part)));
    for (const node of page.querySelectorAll(".stale .good")) node.classList.remove("good");
    sync(main, page);
    const {sign, level, word} = isLost ? {sign: "✕", level: "bad"} : state();
    const name = status ? vmName() : location.hostname;
    document.title = cut(isLost ? `✕ no answer: ${name}` : `${sign} ${name}${word && `: ${word}`}`, 120);
    const picture = `<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16' fill='${COLORS[level]}'>`
      + `${ICONS[sign]} fill='none' stroke='#fff' stroke-width='2'/></svg>`;
    const icon = document.querySelector("link[rel=icon]"), href = `data:image/svg+xml,${encodeURIComponent(picture)}`;
    if (icon.href !== href) icon.href = href;
  };

  // Without an answer for so long, with a request that failed since, the agent is gone or hangs.
  const checkLost = () => {
    const limit = document.hidden ? HIDDEN_LOST_MS : LOST_MS;
    if (isLost || !hasFailed || performance.now() - answered < limit) return;
    isLost = true;
    draw();
  };

  const copy = async (line) => {
    try {
      await navigator.clipboard.writeText(line);
    } catch {  // the page came by plain HTTP from another machine
      const field = el("textarea", {class: "copied"});
      field.value = line;
      document.body.append(field);
      field.select();
      document.execCommand("copy");
      field.remove();
    }
    copied = line;
    draw();
    setTimeout(() => {
      copied = "";
      draw();
    }, COPIED_MS);
  };

  const poll = (path, take, fail) => {
    let timer = 0, isAsking = false;
    const ask = async () => {
      if (isAsking) return;
      isAsking = true;
      clearTimeout(timer);
      let found = null;
      try {
        const answer = await fetch(path, {cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS)});
        const body = await answer.text();
        if (!answer.ok) throw Object.assign(new Error(body), {isAnswer: true});
        found = JSON.parse(body);
      } catch (error) {
        fail(error);
      }
      try {
        if (found) take(found);
      } finally {
        isAsking = false;
        timer = setTimeout(ask, document.hidden ? HIDDEN_REFRESH_MS : REFRESH_MS);
      }
    };
    document.addEventListener("visibilitychange", () => { if (!document.hidden) ask(); });
    ask();
  };

  poll("status", (found) => {
    if (status && status.version !== found.version) location.reload();  // the agent was upgraded, and this page too
    status = found;
    answered = performance.now();
    hasFailed = isLost = false;
    gaps.push(Date.now() - Date.parse(status.at));
    if (gaps.length > CLOCK_ANSWERS) gaps.shift();
    ahead = Math.min(...gaps);
    draw();
    tick();
  }, () => {
    hasFailed = true;
    checkLost();
  });
  poll("history", (found) => {
    histories = found.histories;
    unread = "";
    draw();
  }, (error) => {
    if (!error.isAnswer) return;  // then the agent is gone, as the page says
    unread = error.message;
    draw();
  });
  main.addEventListener("click", ({target}) => {
    const button = target.closest("button[data-copy]");
    if (button) copy(button.dataset.copy);
  });
  // On paper everything is open.
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...main.querySelectorAll("details:not([open])")];
    for (const one of opened) one.open = true;
  });
  addEventListener("afterprint", () => {
    for (const one of opened) one.open = false;
  });
  setInterval(() => {
    checkLost();
    tick();
  }, TICK_MS);
})();
