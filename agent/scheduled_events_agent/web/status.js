// Shows what the agent answers at status and history, and follows it.
// Every text becomes a text node and never markup. What has changed is put in place, so that what a reader has
// opened, selected or focused stays.
"use strict";
(() => {
  const REFRESH_MS = 2000, HIDDEN_REFRESH_MS = 30000, TIMEOUT_MS = 10000, TICK_MS = 250, DAY_MS = 86400000;
  const CLOCK_ANSWERS = 10;
  const MOST = {events: 50, resources: 12, names: 40, entries: 40, characters: 600, inName: 80, ofOutput: 2000};
  const DOTS = {good: "#15803d", busy: "#b45309", bad: "#b91c1c"};
  const TONES = {recovery_failed: "bad", held: "bad", preparing: "busy", recovering: "busy", started: "busy"};
  const STAGES = {prepare: "prepare", on_start: "on start", recover: "recover"};
  const STEPS = {
    done: ["good", "✓", "done"], running: ["busy", "▸", "running"],
    queued: ["busy", "…", "waits for another run"], failed: ["bad", "✕", "failed"],
    open: ["", "·", "to do"], not_run: ["", "-", "not run"],
  };
  const SOURCES = {User: "a user", Platform: "Azure's platform"};
  const WHOM = {
    self: "this VM alone", shared: "this VM and others", others: "other VMs only",
    unknown: "it is not known whether this VM",
  };
  const BAD_OUTCOMES = ["failed", "timed_out", "not_started"];
  const BAD_KINDS = ["held", "approval_failed", "approval_needed", "hook_missing", "recovery_failed"];

  const main = document.getElementById("main"), lost = document.getElementById("lost");
  let status = null, histories = null, unread = "";
  // How far this browser's clock is ahead of the agent's: of the last answers, the quickest tells best.
  const gaps = [];
  let ahead = Infinity;

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
  const chip = (word, tone) => el("span", {class: `chip ${tone}`}, words(word, MOST.inName));
  const more = (count, what, tag = "p") =>
    count > 0 ? el(tag, {class: "quiet"}, `… ${count.toLocaleString("en")} more ${what}`) : "";
  const list = (facts) =>
    el("dl", {}, facts.filter(([, value]) => value !== "").map(
      ([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  const section = (id, title, ...content) =>
    el("section", {"aria-labelledby": id}, el("h2", {id}, title), content);
  // An id may be any text; this is one without blanks, and another for each.
  const key = (workflow) => workflow.id.replace(/[^A-Za-z0-9-]/g, (one) => `_${one.charCodeAt(0).toString(16)}`);
  const separated = (nodes) => nodes.flatMap((node, i) => (i ? [", ", node] : [node]));

  // --- times

  const span = (ms) => {
    const seconds = Math.max(0, Math.floor(ms / 1000)), minutes = Math.floor(seconds / 60);
    const hours = Math.floor(seconds / 3600), days = Math.floor(seconds / 86400);
    if (days) return `${days}d ${hours % 24}h`;
    if (hours) return `${hours}h ${minutes % 60}m`;
    return minutes ? `${minutes}m ${seconds % 60}s` : `${seconds}s`;
  };
  const now = () => Date.now() - ahead;
  const iso = (at) => `${at.slice(0, 19)}Z`;
  const stamp = (at) => `${at.slice(0, 10)} ${at.slice(11, 19)} UTC`;
  const moment = (at) => el("time", {datetime: iso(at)}, stamp(at));
  const until = (at) =>
    el("time", {datetime: iso(at), "data-until": at}, span(Date.parse(at) - now()));
  const since = (at) =>
    el("time", {datetime: iso(at), "data-since": at}, span(now() - Date.parse(at)));
  const tick = () => {
    for (const time of main.querySelectorAll("time[data-until],time[data-since]")) {
      const {until: end, since: start} = time.dataset;
      const text = span(end ? Date.parse(end) - now() : now() - Date.parse(start));
      if (time.textContent !== text) time.textContent = text;
    }
  };

  // --- the agent

  const vmName = () => (status.vm.names.length ? status.vm.names[0] : "this VM");

  const top = () => {
    const chips = [status.ready ? chip("ready", "good") : chip("not ready: /readyz answers 503", "busy")];
    if (status.health !== "ok") chips.push(chip("not healthy", "bad"));
    if (status.mode === "observe") chips.push(chip("only observes", "busy"));
    const polled = status.last_poll_at ? ["Last good poll ", since(status.last_poll_at), " ago"] : "No good poll yet";
    return [
      el("header", {}, el("p", {class: "product"}, "scheduled-events-agent"), el("h1", {}, words(vmName())),
        el("p", {class: "chips"}, chips)),
      el("div", {class: `headline ${status.tone}`},
        el("p", {role: "status"}, words(status.headline)), el("p", {class: "polled"}, polled)),
    ];
  };

  const problems = () => {
    const isHealthy = status.health === "ok";
    const notes = isHealthy ? [] : status.health.slice(0, MOST.names).map((text) => ["bad", text]);
    const note = (text) => notes.push(["busy", text]);
    if (status.poll_failure && isHealthy) note(`The last poll failed: ${status.poll_failure}`);
    for (const {name, waiting, failure} of status.notify.filter((target) => target.failure).slice(0, MOST.names)) {
      note(`Notifying ${name} fails: ${failure.reason}; notices waiting: ${waiting}`);
    }
    const {fleet} = status;
    if (fleet && fleet.failure) note(`The table of the fleet cannot be used: ${fleet.failure}`);
    if (!status.vm.names.length) note("It is not known yet which name this VM has in events, so none counts as its own.");
    for (const one of status.policy.needs_restart) note(`${one}: needs a restart`);
    if (unread) note(`What happened before cannot be shown: ${unread}`);
    const boxes = notes.map(([tone, text]) => el("li", {class: `box ${tone}`}, words(text)));
    const refused = status.policy.refused.split("\n");
    return [
      boxes.length ? el("ul", {class: "boxes"}, boxes) : "",
      status.policy.refused ? el("section", {class: "box bad", "aria-labelledby": "refused"},
        el("h2", {id: "refused"}, "The policy file was refused"),
        el("p", {}, "The policy from before is in force."),
        el("pre", {}, words(refused.slice(0, MOST.names).join("\n"), 4000)),
        more(refused.length - MOST.names, "lines")) : "",
    ];
  };

  const runningAlone = () => {
    const hooks = status.running.filter((hook) => hook.stage === "on_clear").map((hook) =>
      el("li", {}, chip("running", "busy"), " the on_clear hook ", el("b", {}, words(hook.hook, MOST.inName)), ", ",
        since(hook.since), " so far"));
    return hooks.length ? el("ul", {class: "alone"}, hooks) : "";
  };

  const agent = () => {
    const {policy, vm, rules, fleet} = status;
    const acts = status.mode === "act" ? "acts" : "only observes: runs no hooks, approves nothing";
    const hash = policy.hash ? [", SHA-256 ", el("code", {}, policy.hash.slice(0, 12))] : "";
    const refused = policy.refused ? el("span", {class: "bad"}, " (the file as it is now was refused)") : "";
    const failure = status.poll_failure
      ? [" ", el("span", {class: "bad"}, "since then: ", words(status.poll_failure))] : "";
    const unavailable = status.recommendations_failure
      ? [" ", el("span", {class: "bad"}, words(status.recommendations_failure))] : "";
    const listed = (names) => separated(names.slice(0, MOST.names).map((name) => words(name, MOST.inName)));
    return el("section", {class: "card", "aria-labelledby": "agent"}, el("h2", {id: "agent"}, "Agent"), list([
      ["Health", status.health === "ok" ? "ok" : el("span", {class: "bad"}, "not healthy, see above")],
      ["Last good poll", [status.last_poll_at ? [since(status.last_poll_at), " ago"] : "never yet", failure]],
      ["Endpoint", code(status.endpoint)],
      ["api-version", [code(status.api_version), unavailable]],
      ["Incarnation", words(status.incarnation) || "no document yet"],
      ["This VM", vm.names.length ? listed(vm.names) : "name not known yet"],
      ["VM id", vm.vm_id ? code(vm.vm_id) : ""],
      ["Mode", acts],
      ["Policy", [code(policy.file), ", read ", moment(policy.read_at), hash, refused]],
      ["Fleet", fleet ? ["group ", words(fleet.group, MOST.inName) || "not known", fleet.awaited.length
        ? ["; waits for ", listed(fleet.awaited), more(fleet.awaited.length - MOST.names, "VMs", "span")] : ""] : ""],
      ["Rules", rules.length ? [listed(rules), more(rules.length - MOST.names, "rules", "span")] : "none"],
      ["Version", [words(status.version), ", started ", moment(status.started_at)]],
    ]));
  };

  // --- events

  // What is known of the last ones. (Where the journal tells of the agent alone, no workflow is named.)
  const events = () => (histories || []).filter((history) => history.workflow);

  const countdown = (workflow) => {
    const {status: state, not_before: at, type} = workflow.event;
    const count = (big, small) => el("p", {class: "count"}, el("b", {}, big), el("small", {}, small));
    if (workflow.is_over) return count("over", "at Azure");
    if (type === "SpotRebalanceRecommendation") return count("a warning", "an eviction may follow");
    if (state === "Started") return count("started", "by Azure");
    if (!at || Date.parse(at) <= now()) return count("any moment", "it may start");
    const isSoon = Date.parse(at) - now() < DAY_MS;
    return count(until(at), `until it may start, ${isSoon ? `${at.slice(11, 19)} UTC` : stamp(at)}`);
  };

  const approval = (workflow, summary) => {
    const {state, failures} = workflow.approval;
    if (state === "confirmed") return [chip("approved", "good"), " ", words(summary.approval)];
    if (state === "requested") return [chip("asking", "busy"), " ", words(summary.approval)];
    return failures ? [chip("failing", "bad"), " ", words(summary.approval)] : words(summary.approval);
  };

  const hooks = (workflow, summary) => {
    const stages = Object.entries(STAGES).map(([stage, title]) => {
      const all = summary.hooks.filter((step) => step.stage === stage);
      const steps = all.slice(0, MOST.names).map((step) => {
        const [tone, sign, meaning] = STEPS[step.state];
        return el("li", {class: tone}, el("span", {"aria-hidden": "true"}, sign), " ", words(step.hook, MOST.inName), " ",
          el("span", {class: "quiet"}, meaning));
      });
      return steps.length ? el("div", {class: "stage"}, el("span", {class: "quiet"}, title),
        el("ol", {class: "steps"}, steps, more(all.length - MOST.names, "hooks", "li"))) : "";
    });
    const failures = [workflow.prepare, workflow.on_start, workflow.recover].filter((progress) => progress.failure)
      .map((progress) => el("p", {class: "bad"}, words(progress.failure)));
    const parts = [...stages, ...failures].filter((part) => part !== "");
    return parts.length ? parts : "";
  };

  const resources = (workflow) => {
    const plain = (name) => name.toLowerCase().replace(/^_/, "");
    const own = new Set(status.vm.names.map(plain)), isOwn = (name) => own.has(plain(name));
    const names = [...workflow.event.resources].sort((one, two) => isOwn(two) - isOwn(one));
    const shown = names.slice(0, MOST.resources).map((name) =>
      isOwn(name) ? el("b", {}, words(name, MOST.inName)) : words(name, MOST.inName));
    const rest = names.length - shown.length;
    const whom = WHOM[workflow.decision.affects];
    return shown.length ? [`${whom}: `, separated(shown), rest ? `, and ${rest} more` : ""] : whom;
  };

  const about = (workflow) => {
    const {event} = workflow;
    const length = event.duration_seconds === null ? "" : `, about ${event.duration_seconds}s long`;
    return [
      ["Affects", resources(workflow)],
      ["From", [words(SOURCES[event.source] || event.source || "unknown"), length]],
      ["Azure says", event.description ? el("q", {}, words(event.description)) : ""],
      ["Id", event.id ? code(event.id) : code("none")],
      ["First seen", [moment(workflow.first_seen_at), ", ", since(workflow.first_seen_at), " ago"]],
    ];
  };

  const overruling = (workflow, summary) => {
    if (!summary.commands.length) return "";
    const aim = workflow.phase === "recovery_failed" ? "To solve it: " : "To overrule: ";
    return el("p", {class: "hint"}, aim, summary.commands.flatMap((line, i) => [i ? " or " : "", code(line)]));
  };

  const card = (summary, workflow, history, isFirst) => {
    const tone = TONES[workflow.phase] || "", name = `e-${key(workflow)}`;
    const facts = [
      ["Now", words(summary.activity)],
      ["Decision", words(workflow.decision.reason)],
      ["Approval", approval(workflow, summary)],
      ["Hooks", hooks(workflow, summary)],
    ];
    const rest = [isFirst ? "" : list(about(workflow)), history ? timeline(history) : ""];
    const phase = workflow.phase === "waiting" ? "pending" : workflow.phase.replaceAll("_", " ");
    return el("article", {id: `c-${key(workflow)}`, class: `card ${tone}`, "aria-labelledby": name},
      el("div", {class: "lead"},
        el("div", {}, el("h3", {id: name}, words(workflow.event.type) || "An event without a type"), chip(phase, tone)),
        countdown(workflow)),
      list(isFirst ? [...facts, ...about(workflow)] : facts),
      overruling(workflow, summary),
      isFirst && !history ? ""
        : el("details", {id: `t-${key(workflow)}`, open: isFirst && "open"},
          el("summary", {}, isFirst ? "Timeline" : "More"), rest));
  };

  const pending = () => {
    if (!status.pending.length) return "";  // the headline says so
    const workflows = new Map(status.pending.map((workflow) => [workflow.id, workflow]));
    const known = new Map(events().map((history) => [history.workflow.id, history]));
    const cards = status.summaries.slice(0, MOST.events).map((summary, i) =>
      card(summary, workflows.get(summary.workflow_id), known.get(summary.workflow_id), !i));
    const title = ["Pending ", el("small", {}, `${status.pending.length}`)];
    return section("pending", title, cards, more(status.pending.length - cards.length, "are pending; /status has them all"));
  };

  // --- what happened

  const entry = (one, dayBefore) => {
    const isBad = BAD_OUTCOMES.includes(one.outcome) || BAD_KINDS.includes(one.kind);
    const tone = isBad ? "bad" : one.outcome === "succeeded" || one.kind === "approved" ? "good" : "";
    const day = one.at.slice(0, 10);
    const output = one.detail.length > MOST.ofOutput ? `…${one.detail.slice(-MOST.ofOutput)}` : one.detail;
    return el("li", {class: tone},
      el("time", {datetime: iso(one.at)}, day === dayBefore ? "" : [day, el("br", {})], one.at.slice(11, 19)),
      el("div", {}, words(one.text), output ? el("pre", {}, output) : ""));
  };

  // The entries, oldest first; of many, the last ones.
  const timeline = (history) => {
    const entries = history.entries.slice(-MOST.entries);
    const days = [history.workflow.first_seen_at, ...entries.map((one) => one.at)].map((at) => at.slice(0, 10));
    const isHidden = entries.some((one) => one.kind === "hook_finished" && !one.detail);
    const command = `scheduled-events-agent history --event ${history.workflow.event.id} ${status.command_options}`;
    return [
      el("ol", {class: "timeline"},
        history.entries.length > entries.length ? el("li", {class: "quiet"}, "… there are earlier entries") : "",
        entries.map((one, i) => entry(one, days[i]))),
      isHidden ? el("p", {class: "hint"}, "With what the hooks wrote: ", code(command.trim())) : "",
    ];
  };

  const past = () => {
    if (!histories) return "";
    const open = new Set(status.pending.map((workflow) => workflow.id));
    const over = events().filter((history) => !open.has(history.workflow.id)).reverse();
    const items = over.map((history, i) => {
      const {workflow, entries} = history, first = workflow.first_seen_at;
      const took = entries.length ? `, ${span(Date.parse(entries.at(-1).at) - Date.parse(first))} long` : "";
      return el("details", {id: `t-${key(workflow)}`, open: !status.pending.length && !i && "open"},
        el("summary", {}, el("b", {}, words(workflow.event.type) || "event"), " ",
          chip(workflow.outcome || workflow.phase, workflow.recover.failure ? "bad" : ""), " ",
          el("span", {}, moment(first), took)),
        el("p", {}, words(workflow.decision.reason)),
        el("p", {class: "quiet"}, code(workflow.event.id), " ", words(workflow.event.description)),
        timeline(history));
    });
    const none = el("p", {class: "none"}, "None that the agent remembers.");
    return section("recent", "Recent events", items.length ? items : none);
  };

  const pauses = () => {
    if (!histories) return "";
    const notes = histories.filter((history) => !history.workflow).flatMap((history) => history.entries)
      .filter((one) => one.kind === "pause").reverse().slice(0, MOST.entries);
    const lines = notes.map((one) => el("li", {}, moment(one.at), el("div", {}, words(one.text))));
    return section("pauses", "Pauses of this machine", lines.length
      ? el("ol", {class: "timeline wide"}, lines) : el("p", {class: "none"}, "None was measured."));
  };

  const footer = () => {
    const link = (name) => el("a", {href: name}, `/${name}`);
    return el("footer", {}, el("p", {}, "As JSON: ", link("status"), ", ", link("history"), ". For programs: ",
      link("metrics"), ", ", link("healthz"), ", ", link("readyz"), "."));
  };

  // --- the page

  // Make the old element like the fresh one, and keep of it what can be kept.
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
    // What has an id is known again wherever it is.
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

  const draw = () => {
    if (!status) return;
    const parts = [top(), problems(), runningAlone(), pending(), past(), pauses(), agent(), footer()];
    sync(main, el("main", {id: "main"}, parts.map((part, i) => el("div", {id: `part-${i}`}, part))));
    document.title = cut(`${vmName()}: ${status.headline}`, 120);
    const dot = `<svg xmlns='http://www.w3.org/2000/svg'><circle cx='8' cy='8' r='7' fill='${DOTS[status.tone]}'/></svg>`;
    const icon = document.querySelector("link[rel=icon]"), href = `data:image/svg+xml,${encodeURIComponent(dot)}`;
    if (icon.href !== href) icon.href = href;
  };

  const follow = (path, take, fail) => {
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

  follow("status", (found) => {
    if (status && status.version !== found.version) location.reload();  // the agent was upgraded, and this page too
    status = found;
    gaps.push(Date.now() - Date.parse(status.at));
    if (gaps.length > CLOCK_ANSWERS) gaps.shift();
    ahead = Math.min(...gaps);
    lost.textContent = "";
    draw();
    tick();
  }, () => {
    const then = status ? ` This is how things were at ${status.at.slice(11, 19)} UTC.` : "";
    lost.textContent = `The agent does not answer.${then}`;
  });
  follow("history", (found) => {
    histories = found.histories;
    unread = "";
    draw();
  }, (error) => {
    if (!error.isAnswer) return;  // then the agent is gone, as the page says at its end
    unread = error.message;
    draw();
  });
  setInterval(tick, TICK_MS);
})();
