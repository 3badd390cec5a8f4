// Step times of plans on a network that the reader chooses: the formulas of gradlab.analysis.forecast (link.py,
// simulator.py, step_time.py, local_steps.py, speed.py), from tapes of plans (tape.py). A test compares both over a grid.
// Times in seconds, sizes in bytes, rates in bits per second.
"use strict";

const gradlabForecast = (() => {
  const HALF_PLAN = "16-bit floats"; // gradlab.analysis.forecast.candidates
  const SPEED_NOISE = 0.05;
  const BACKWARD_SHARE = 2 / 3;
  const LENGTH_BYTES = 4, MESSAGE_SECONDS = 50e-6;
  const FULL_MESSAGE = 1 / 32, LEAST_MESSAGE = 1 / 256;

  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const largest = (values) => values.reduce((most, value) => Math.max(most, value), 0);
  const bitLength = (number) => (number > 0 ? Math.floor(Math.log2(number)) + 1 : 0);

  // --- what a collective asks of links: gradlab.analysis.forecast.link ---------------------------------------------

  function allReduce(nbytes, ranks) {
    const wire = 2 * (ranks - 1) * Math.ceil(nbytes / ranks);
    return { wire, path: wire, rounds: 2 * (ranks - 1) };
  }

  function allGather(nbytes, ranks) {
    const wire = (ranks - 1) * nbytes;
    return { wire, path: wire, rounds: ranks - 1, gathered: true };
  }

  function broadcast(nbytes, root, ranks) {
    const relative = (ranks - root) % ranks, depth = bitLength(ranks - 1);
    let sends = 0;
    for (let round = bitLength(relative); round < depth; round++) sends += relative + 2 ** round < ranks ? 1 : 0;
    return { wire: nbytes * sends, path: depth * nbytes, rounds: depth };
  }

  const queued = (sizes) => (sizes.some((size) => size > 0) ? Math.max(0, sizes.length - 2) : 0);

  function allToAll(sizes) {
    const received = largest(sizes) * (sizes.length - 1), all = sum(sizes);
    const mostSent = all - Math.min(...sizes);
    const rounds = sizes.length > 1 ? 1 : 0;
    return { wire: all - sizes[0], path: Math.max(mostSent, received), rounds, gathered: true, queued: queued(sizes) };
  }

  function gatherOfLengths(sizes) {
    const others = sizes.length - 1;
    const path = Math.max(others * largest(sizes), sum(sizes) - Math.min(...sizes));
    return { wire: others * sizes[0], path, rounds: others ? 1 : 0, gathered: true, queued: queued(sizes) };
  }

  function ring(sizes) {
    const count = sizes.length, at = (index) => sizes[((index % count) + count) % count];
    let wire = 0;
    for (let hop = 0; hop < count - 1; hop++) wire += at(-hop) + at(1 - hop);
    return { wire, path: 2 * (count - 1) * largest(sizes), rounds: 2 * (count - 1) };
  }

  const after = (lengths, values) => ({
    wire: lengths.wire + values.wire,
    path: lengths.path + values.path,
    rounds: lengths.rounds + values.rounds,
    gathered: true,
    queued: (lengths.queued || 0) + (values.queued || 0),
  });

  const expanded = (runs) => runs.flatMap(([size, count]) => new Array(count).fill(size));
  const elementwise = (lists) => lists[0].map((_, position) => sum(lists.map((list) => list[position])));

  // A request is [kind, bytes or sizes], see tape.py. Those of one kind travel as one.
  function fused(kind, together, ranks) {
    const [name, root] = kind.split(":");
    if (name === "parts" || name === "varying parts") {
      const parts = together.filter((request) => request[2] !== "gather").map((request) => expanded(request[1]));
      const gathers = together.filter((request) => request[2] === "gather").map((request) => expanded(request[1]));
      const nothing = new Array(ranks).fill(0);
      const scattered = allToAll(parts.length ? elementwise(parts) : nothing);
      const gathered = gatherOfLengths(gathers.length ? elementwise(gathers) : nothing);
      const values = {
        wire: scattered.wire + gathered.wire,
        path: scattered.path + gathered.path,
        rounds: Math.max(scattered.rounds, gathered.rounds),
        gathered: true,
        queued: Math.max(scattered.queued, gathered.queued),
      };
      if (name === "parts") return values;
      const told = elementwise(parts.map((sizes) => sizes.map((size) => (size ? LENGTH_BYTES : 0))));
      return after(allToAll(told), values);
    }
    if (name === "ring") return ring(elementwise(together.map((request) => expanded(request[1]))));
    const nbytes = sum(together.map((request) => request[1]));
    if (name === "mean" || name === "sum") return allReduce(nbytes, ranks);
    if (name === "broadcast") return broadcast(nbytes, Number(root), ranks);
    if (name === "gather") return allGather(nbytes, ranks);
    return after(allGather(LENGTH_BYTES * together.length, ranks), allGather(nbytes, ranks));
  }

  function transfers(requests, ranks) {
    const alike = new Map();
    for (const request of requests) {
      if (!alike.has(request[0])) alike.set(request[0], []);
      alike.get(request[0]).push(request);
    }
    const made = [...alike].map(([kind, together]) => fused(kind, together, ranks));
    return made.filter((transfer) => transfer.path);
  }

  function secondsPerByte(link) {
    return Math.max((8 * (1 + link.header_share)) / link.bits_per_second, link.host_seconds_per_byte);
  }

  function busySeconds(link, transfer) {
    const factor = transfer.gathered ? link.gather_factor : 1;
    const sending = (transfer.queued || 0) * Math.min(link.latency_seconds, MESSAGE_SECONDS);
    return link.collective_seconds + sending + factor * transfer.path * secondsPerByte(link);
  }

  const delaySeconds = (link, transfer) => transfer.rounds * link.latency_seconds;

  // --- a step: gradlab.analysis.forecast.simulator ---------------------------------------------------------------

  class Clock {
    constructor(compute, speed) {
      Object.assign(this, { compute, speed, now: 0, computed: 0, waited: 0 });
    }
    work(seconds) {
      const together = Math.min(seconds, this.compute - this.computed);
      this.computed += together;
      this.now += together / this.speed + (seconds - together);
    }
    serve(seconds) {
      this.computed -= 2 * (1 - this.speed) * Math.min(seconds, this.compute - this.computed);
    }
    waitForBackward(computed) {
      const left = Math.max(0, computed - this.computed);
      this.computed += left;
      this.now += left;
    }
    waitForNetwork(moment) {
      const left = Math.max(0, moment - this.now);
      const hidden = Math.min(left, this.compute - this.computed);
      this.computed += hidden;
      this.waited += left - hidden;
      this.now += left;
    }
  }

  class Wire {
    constructor(link, clock) {
      Object.assign(this, { link, clock, free: 0, bytes: 0 });
    }
    send(transfer, issued) {
      this.free = Math.max(this.free, issued) + busySeconds(this.link, transfer);
      this.bytes += transfer.wire;
      this.clock.serve(transfer.path * this.link.host_seconds_per_byte);
      return this.free + delaySeconds(this.link, transfer);
    }
  }

  function half(node, nbytes, gathered = false) {
    const path = Math.floor((nbytes * (node.local_ranks - 1)) / node.local_ranks);
    return { wire: path, path, rounds: node.local_ranks - 1, gathered };
  }

  class Inside {
    constructor(within, clock) {
      this.within = within;
      this.clock = clock;
      this.wire = within && new Wire(within.node.inside, clock);
    }
    averaged(nbytes) {
      const { node, sharded } = this.within, part = half(node, nbytes);
      let arrival = this.wire.send(part, this.clock.now);
      if (sharded) arrival = this.wire.send(part, this.clock.now);
      return arrival;
    }
    spread(nbytes, moment) {
      if (!this.within || this.within.sharded) return moment;
      return this.wire.send(half(this.within.node, nbytes, true), moment);
    }
  }

  const bucketBytes = (bucket) => bucket.in_place || sum(bucket.exchanges.map((exchange) => exchange.bytes));

  function messageBytes(request) {
    if (request[0] === "varying" || request[0] === "varying parts") return Infinity;
    if (request[2] === "gather") return largest(request[1].map(([size]) => size));
    return Array.isArray(request[1]) ? sum(request[1].map(([size, count]) => size * count)) : request[1];
  }

  // Exchanges of one rank that share collectives: gradlab.executor.ticks.
  class Ticks {
    constructor(issue, clock, segmentBytes) {
      Object.assign(this, { issue, clock, segmentBytes, running: [], fresh: [], newBytes: 0, messageBytes: 0 });
      this.arrives = null;
      this.lastBytes = 0;
    }
    start(exchange) {
      const one = { exchange, turn: 0, requests: [], done: false };
      this.advance(one);
      this.fresh.push(one);
      this.newBytes += exchange.bytes;
      this.messageBytes += sum(one.requests.map(messageBytes));
      const full = FULL_MESSAGE * this.segmentBytes;
      if (this.newBytes >= this.segmentBytes && this.messageBytes >= full) this.tick();
    }
    advance(one) {
      const { turns, apply } = one.exchange, last = one.turn === turns.length - 1;
      const [seconds, copy, requests] = turns[one.turn];
      this.clock.work(copy + (last ? seconds + apply : seconds));
      one.requests = requests;
      one.done = last;
      one.turn += 1;
    }
    endPart() {
      if (this.fresh.length && this.messageBytes >= LEAST_MESSAGE * this.segmentBytes) this.tick();
    }
    tick() {
      if (this.arrives !== null) {
        this.clock.waitForNetwork(this.arrives);
        this.arrives = null;
        this.running.forEach((one) => this.advance(one));
      }
      this.running = [...this.running, ...this.fresh].filter((one) => !one.done);
      this.lastBytes = this.newBytes || this.lastBytes;
      this.fresh = [];
      this.newBytes = this.messageBytes = 0;
      this.arrives = this.issue(this.running.flatMap((one) => one.requests));
    }
    drain() {
      while (this.running.length || this.fresh.length) this.tick();
    }
  }

  const FLAG = { bytes: 0, apply: 0, turns: [[0, 0, [["mean:float32", 4]]], [0, 0, []]] };

  function simulate(buckets, compute, link, ranks, { speed = 1, within = null, segmentBytes }) {
    const clock = new Clock(compute, speed), wire = new Wire(link, clock), inside = new Inside(within, clock);
    const inPlace = [];
    const issue = (requests) =>
      largest(transfers(requests, ranks).map((transfer) => wire.send(transfer, clock.now)));
    const ticks = new Ticks(issue, clock, segmentBytes);
    for (const bucket of buckets) {
      clock.waitForBackward(bucket.share * compute);
      clock.waitForNetwork(within ? inside.averaged(bucketBytes(bucket)) : clock.now);
      clock.work(bucket.scan);
      if (bucket.in_place) {
        const dense = allReduce(bucket.in_place, ranks);
        inPlace.push([bucket.in_place, wire.send(dense, clock.now)]);
      }
      bucket.exchanges.forEach((exchange) => ticks.start(exchange));
      ticks.endPart();
    }
    if (buckets.some((bucket) => bucket.exchanges.length)) {
      ticks.start(FLAG);
      ticks.tick();
      ticks.drain();
      inPlace.push([Math.floor(ticks.lastBytes), clock.now]);
    }
    for (const [nbytes, moment] of inPlace) clock.waitForNetwork(inside.spread(nbytes, moment));
    clock.waitForBackward(compute);
    const encode = clock.now - compute - clock.waited;
    return { seconds: clock.now, compute, encode, communicate: clock.waited, wire_bytes: wire.bytes };
  }

  // --- a plan beside dense training: gradlab.analysis.forecast.step_time -------------------------------------------

  function scaled(buckets, factor) {
    return buckets.map((bucket) => ({
      ...bucket,
      scan: factor * bucket.scan,
      exchanges: bucket.exchanges.map((exchange) => ({
        ...exchange,
        apply: factor * exchange.apply,
        turns: exchange.turns.map(([seconds, copy, requests]) => [factor * seconds, factor * copy, requests]),
      })),
    }));
  }

  function largestShare(sizes, parts) {
    const held = new Array(parts).fill(0);
    for (const size of [...sizes].sort((one, other) => other - one)) held[held.indexOf(Math.min(...held))] += size;
    return Math.max(...held) / (sum(held) || 1);
  }

  // A network: compute, link, nodes, cores, node (several ranks to a node, or null), segmentBytes.
  const speedOf = (network) => Math.min(1, Math.max(1, network.cores) / 2);

  function step(buckets, network, ranks = network.nodes, within = null) {
    const { compute, link, segmentBytes } = network;
    return simulate(buckets, compute, link, ranks, { speed: speedOf(network), within, segmentBytes });
  }

  // A plan's step. Between nodes codecs' work is shared out among a node's ranks.
  function planStep(buckets, network) {
    const { node } = network;
    if (!node) return step(buckets, network);
    const sizes = buckets.flatMap((bucket) => bucket.exchanges.map((exchange) => exchange.bytes));
    const mine = scaled(buckets, largestShare(sizes, node.local_ranks));
    return step(mine, network, network.nodes, { node, sharded: false });
  }

  // The fastest steps without compression, in 32 and in 16 bits. dense: the plan's buckets without it.
  function denseSteps(dense, network) {
    const { compute, nodes, node } = network;
    const halves = dense.map((bucket) => ({ ...bucket, in_place: Math.floor(bucket.in_place / 2) }));
    if (!node) return { dense: step(dense, network), half: step(halves, network), way: "plain DDP" };

    const hsdp = (of) => {
      const sharded = step(of, network, nodes, { node, sharded: true });
      const gathers = busySeconds(node.inside, half(node, sum(of.map(bucketBytes)), true));
      const exposed = Math.max(0, gathers - (1 - BACKWARD_SHARE) * compute);
      return { ...sharded, seconds: sharded.seconds + exposed, communicate: sharded.communicate + exposed };
    };
    const ways = (of) => ({
      "plain DDP": step(of, network, nodes * node.local_ranks),
      hierarchical: step(of, network, nodes, { node, sharded: false }),
      HSDP: hsdp(of),
    });
    const fastest = (of) => Object.entries(of).reduce((best, one) => (one[1].seconds < best[1].seconds ? one : best));
    const [way, inFull] = fastest(ways(dense));
    return { dense: inFull, half: fastest(ways(halves))[1], way };
  }

  // A local step's seconds with its share of an exchange after every so many: gradlab.analysis.forecast.local_steps.
  function localStep(exchange, network, every, streaming) {
    const { compute, link } = network, share = exchange.seconds / every;
    if (!streaming) return compute + share;
    const lacking = 2 * (1 - speedOf(network));
    const work = lacking * (exchange.encode + exchange.wire_bytes * link.host_seconds_per_byte);
    const beside = exchange.seconds > 0 ? Math.min(1, (every * compute) / exchange.seconds) : 1;
    return Math.max(compute + (beside * work) / every, share);
  }

  // Seconds of all plans' steps, and of the fastest dense ones. tapes: by plan, at the network's number of nodes.
  // every: local steps, 1 for an exchange in every step; streaming: whether local steps go on meanwhile.
  function stepTimes(tapes, network, every = 1, streaming = false) {
    const names = Object.keys(tapes);
    const alone = every > 1 ? { ...network, compute: 0 } : network;
    const seconds = (one) => (every > 1 ? localStep(one, network, every, streaming) : one.seconds);
    const { dense, half, way } = denseSteps(tapes[names[0]].dense, alone);
    const plans = Object.fromEntries(names.map((name) => [name, seconds(planStep(tapes[name].buckets, alone))]));
    const cast = network.node ? plans[HALF_PLAN] : undefined;
    return { dense: seconds(dense), half: cast ?? seconds(half), way, plans };
  }

  // --- in words: gradlab.analysis.forecast.speed, gradlab.formatting ------------------------------------------------

  function significant(value, digits = 3) {
    if (!Number.isFinite(value) || value === 0) return String(value);
    const decimalsOf = (number) => digits - 1 - Math.floor(Math.log10(Math.abs(number)));
    const scale = 10 ** decimalsOf(value), rounded = Math.round(value * scale) / scale;
    return rounded.toFixed(Math.max(0, decimalsOf(rounded)));
  }

  function formatSeconds(value) {
    if (value === 0) return "0 s";
    if (Math.abs(value) >= 120) {
      const whole = Math.round(value), rest = String(whole % 60).padStart(2, "0");
      return `${Math.floor(whole / 60)} min ${rest} s`;
    }
    for (const [scale, unit] of [[1, "s"], [1e-3, "ms"], [1e-6, "\u00b5s"]]) {
      if (Math.abs(value) >= 0.9995 * scale) return `${significant(value / scale)} ${unit}`;
    }
    return `${significant(value * 1e9)} ns`;
  }

  function formatPercent(share) {
    const value = 100 * share;
    return value !== 0 && Math.abs(value) < 0.5 ? `${significant(value, 1)} %` : `${value.toFixed(0)} %`;
  }

  function spellRate(rate) {
    for (const [unit, scale] of [["Tbit/s", 1e12], ["Gbit/s", 1e9], ["Mbit/s", 1e6], ["kbit/s", 1e3]]) {
      if (rate >= 0.9995 * scale) return `${Number((rate / scale).toPrecision(4))} ${unit}`;
    }
    return `${Number(rate.toPrecision(4))} bit/s`;
  }

  const counted = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

  // What to take, and the fastest plan where that is another one: gradlab.analysis.forecast.decide, whose words are given.
  // judged: by plan, { text, allowed }, what replays say; limit: the allowed loss in prose.
  function verdict(times, network, words, judged, limit, every = 1) {
    const { dense, half } = times;
    const fastestOf = (names) => {
      const name = names.reduce((best, one) => (times.plans[one] < times.plans[best] ? one : best), names[0]);
      return name !== undefined && 1 - times.plans[name] / dense > SPEED_NOISE ? name : null;
    };
    const names = Object.keys(times.plans);
    const fastest = fastestOf(names), closest = fastestOf(names.filter((name) => judged[name].allowed));
    const halfSaves = 1 - half / dense > SPEED_NOISE;
    const slower = closest === null || (halfSaves && times.plans[closest] >= (1 - SPEED_NOISE) * half);
    const plan = slower ? null : closest;
    const seconds = plan !== null ? times.plans[plan] : halfSaves ? half : dense;
    const steps = every > 1 ? ` with an exchange after every ${every} steps` : "";
    const at = `${spellRate(network.link.bits_per_second)} between ${counted(network.nodes, "node")}`;
    const filled = (text, name, time) => {
      const values = {
        where: `At ${at}${steps}`, plan: name, seconds: formatSeconds(time), dense: formatSeconds(dense),
        half: formatSeconds(half), saved: formatPercent(1 - time / dense), noise: formatPercent(SPEED_NOISE), limit,
        judged: name === null ? "" : judged[name].text,
      };
      return text.replace(/\{(\w+)\}/g, (_, key) => values[key]);
    };
    const take = plan !== null ? "compress" : halfSaves ? "16 bits" : "do not compress";
    const lines = [take, `${take}, cost`].map((one) => filled(words[one], plan, seconds));
    if (fastest !== null && fastest !== closest && times.plans[fastest] < (1 - SPEED_NOISE) * seconds) {
      lines.push(filled(words.refused, fastest, times.plans[fastest]));
    }
    return lines.join(" ");
  }

  return { planStep, denseSteps, stepTimes, verdict, formatSeconds, formatPercent, spellRate, significant };
})();
