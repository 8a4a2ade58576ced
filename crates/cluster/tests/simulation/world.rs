//! A cluster in one thread: hosts, links, streams and an arbiter, all driven by one seed.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};

use hotspare_cluster::register::{Record, Wish};
use hotspare_cluster::{Action, Beat, Closed, Config, Event, Nanos, Node, Quorum, Role};
use hotspare_image::{Epoch, NodeId, Position, Term};

use super::court::{Client, Spoken};

pub const MS: Nanos = 1_000_000;
pub const EPOCH: Nanos = 100 * MS;
pub const LEASE: Nanos = 400 * MS;

/// SplitMix64 (Steele, Lea, Flood 2014): enough for choosing faults.
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Dice {
        Dice(seed)
    }
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

/// Which arbiter the cluster has, hence which promises hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Arbiter {
    /// Everybody gets every term.
    None,
    /// One register, reachable unless cut off; output waits for nobody.
    Lease,
    /// As before, and what guests do to shared files matters, too.
    Shared,
    /// One register; output waits for the spares.
    Commit,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Guest {
    Absent,
    Runs,
    Frozen,
}

pub struct Host {
    pub node: Option<Node>,
    pub incarnation: u64,
    pub guest: Guest,
    /// The guest is about to run.
    pub taking_over: bool,
    ghost: Option<(Term, Position)>,
    pub taken: Position,
    wants: Option<NodeId>,
    pub last_term: Term,
    pub client: Client,
    /// What spares have acknowledged.
    pub committed: BTreeMap<NodeId, Epoch>,
    /// Spares that output waits for.
    pub awaited: BTreeSet<NodeId>,
    /// When checkpoints were taken.
    pub cuts: BTreeMap<Epoch, Nanos>,
    /// Its clock: what it said at the beginning, and how much it gains, in millionths.
    clock: (Nanos, i64),
}

#[derive(Debug)]
pub enum Due {
    Event {
        to: NodeId,
        incarnation: u64,
        event: Event,
    },
    Beat {
        to: NodeId,
        beat: Beat,
    },
    Pump {
        from: NodeId,
        to: NodeId,
        stream: u64,
    },
    Dial {
        from: NodeId,
        to: NodeId,
    },
    Read {
        node: NodeId,
        exchange: u64,
    },
    Swap {
        node: NodeId,
        exchange: u64,
        version: u64,
        record: Record,
    },
    Answer {
        node: NodeId,
        exchange: u64,
        version: u64,
        record: Option<Record>,
        swapped: Option<bool>,
    },
    NoAnswer {
        node: NodeId,
        exchange: u64,
    },
    Noticed {
        node: NodeId,
        version: u64,
        record: Record,
    },
    StartAgain {
        node: NodeId,
        incarnation: u64,
        term: Term,
    },
    Epoch {
        node: NodeId,
        incarnation: u64,
    },
    Restart {
        node: NodeId,
    },
    TakenOver {
        node: NodeId,
        incarnation: u64,
    },
}

pub struct World {
    pub now: Nanos,
    pub dice: Dice,
    pub arbiter: Arbiter,
    pub quorum: Quorum,
    pub register: Option<Record>,
    pub version: u64,
    pub spoken: Spoken,
    pub hosts: BTreeMap<NodeId, Host>,
    queue: BinaryHeap<Reverse<(Nanos, u64)>>,
    due: BTreeMap<u64, Due>,
    pub order: u64,
    /// Messages under way, per direction of each stream.
    streams: BTreeMap<(NodeId, NodeId), (u64, VecDeque<Event>)>,
    cut: BTreeSet<(NodeId, NodeId)>,
    pub arbiter_cut: BTreeSet<NodeId>,
    pub takeovers: Vec<(Term, NodeId)>,
    pub ever_cut: bool,
    pub ended: bool,
    pub fail_takeovers_percent: u64,
    pub fail_freezes_percent: u64,
    /// Kept only when a seed that failed is run again.
    pub logs: bool,
    log: VecDeque<String>,
}

impl World {
    pub fn config(&self, node: NodeId) -> Config {
        Config {
            fence_at_expiry: self.arbiter == Arbiter::Shared,
            has_arbiter: self.arbiter != Arbiter::None,
            quorum: self.quorum,
            ..Config::new(node)
        }
    }

    pub fn new(seed: u64, hosts: u64, arbiter: Arbiter, quorum: Quorum, logs: bool) -> World {
        let mut world = World {
            now: 0,
            dice: Dice::new(seed),
            arbiter,
            quorum,
            register: None,
            version: 0,
            spoken: Spoken::default(),
            hosts: BTreeMap::new(),
            queue: BinaryHeap::new(),
            due: BTreeMap::new(),
            order: 0,
            streams: BTreeMap::new(),
            cut: BTreeSet::new(),
            arbiter_cut: BTreeSet::new(),
            takeovers: Vec::new(),
            ever_cut: false,
            ended: false,
            fail_takeovers_percent: 0,
            fail_freezes_percent: 0,
            logs,
            log: VecDeque::new(),
        };
        for id in (1..=hosts).map(NodeId) {
            let host = Host {
                node: None,
                incarnation: 0,
                taking_over: false,
                client: Client::default(),
                committed: BTreeMap::new(),
                awaited: BTreeSet::new(),
                cuts: BTreeMap::new(),
                clock: (world.dice.below(1 << 40), world.dice.below(8_001) as i64 - 4_000),
                guest: Guest::Absent,
                ghost: None,
                taken: Position::default(),
                wants: None,
                last_term: Term(0),
            };
            world.hosts.insert(id, host);
        }
        let now = world.local(NodeId(1));
        let (first, actions) = Node::first(world.config(NodeId(1)), now);
        world.host(NodeId(1)).node = Some(first);
        world.host(NodeId(1)).guest = Guest::Runs;
        world.carry_out(NodeId(1), actions);
        world.at(EPOCH, Due::Epoch { node: NodeId(1), incarnation: 0 });
        for id in (2..=hosts).map(NodeId) {
            let now = world.local(id);
            world.host(id).node = Some(Node::spare(world.config(id), now));
            world.host(id).wants = Some(NodeId(1));
            world.at(MS, Due::Dial { from: id, to: NodeId(1) });
        }
        world
    }

    pub fn host(&mut self, id: NodeId) -> &mut Host {
        self.hosts.get_mut(&id).expect("a host of this world")
    }

    /// What a host's clock says.
    pub fn local(&self, id: NodeId) -> Nanos {
        let (began, gain) = self.hosts[&id].clock;
        began + self.now.saturating_add_signed(self.now as i64 / 1_000_000 * gain)
    }

    /// When a host's clock will say that.
    pub fn global(&self, id: NodeId, local: Nanos) -> Nanos {
        if local == Nanos::MAX {
            return local;
        }
        let (began, gain) = self.hosts[&id].clock;
        let says = |at: Nanos| began + at.saturating_add_signed(at as i64 / 1_000_000 * gain);
        // A guess, and steps of its error.
        let mut at = local.saturating_sub(began);
        for _ in 0..4 {
            at = at.saturating_add_signed(local as i64 - says(at) as i64);
        }
        while says(at) < local {
            at += local - says(at);
        }
        at
    }

    pub fn at(&mut self, time: Nanos, due: Due) {
        self.order += 1;
        self.queue.push(Reverse((time, self.order)));
        self.due.insert(self.order, due);
    }

    pub fn delay(&mut self) -> Nanos {
        MS / 20 + self.dice.below(3 * MS)
    }

    fn connected(&self, a: NodeId, b: NodeId) -> bool {
        !self.cut.contains(&(a.min(b), a.max(b)))
    }

    /// Lets time pass; faults come from outside, between calls.
    pub fn run_until(&mut self, end: Nanos) {
        loop {
            let queued = self.queue.peek().map_or(Nanos::MAX, |next| next.0.0);
            let tick = self
                .hosts
                .iter()
                .filter_map(|(id, host)| {
                    Some((self.global(*id, host.node.as_ref()?.next_tick()), *id))
                })
                .min();
            let ticking = tick.filter(|(time, _)| *time <= queued);
            let next = ticking.map_or(queued, |(time, _)| time).max(self.now);
            if next > end {
                self.now = end;
                return;
            }
            self.now = next;
            match ticking {
                Some((_, id)) => self.deliver(id, Event::Tick),
                None => {
                    let Reverse((_, order)) = self.queue.pop().expect("peeked");
                    let due = self.due.remove(&order).expect("queued with its number");
                    self.happen(due);
                }
            }
            self.speak();
            self.check();
        }
    }

    fn happen(&mut self, due: Due) {
        match due {
            Due::Event { to, incarnation, event } => {
                if self.host(to).incarnation == incarnation {
                    self.deliver(to, event);
                }
            }
            Due::Beat { to, beat } => {
                if self.connected(beat.from, to) {
                    self.deliver(to, Event::Beat(beat));
                }
            }
            Due::Pump { from, to, stream } => self.pump(from, to, stream),
            Due::Dial { from, to } => self.dial(from, to),
            Due::Read { node, exchange } => self.arrive(node, exchange, None),
            Due::Swap { node, exchange, version, record } => {
                self.arrive(node, exchange, Some((version, record)));
            }
            Due::Answer { node, exchange, version, record, swapped } => {
                self.answered(node, exchange, version, record, swapped);
            }
            Due::NoAnswer { node, exchange } => self.no_answer(node, exchange),
            Due::Noticed { node, version, record } => self.noticed(node, version, record),
            Due::StartAgain { node, incarnation, term } => {
                self.start_again(node, incarnation, term);
            }
            Due::Epoch { node, incarnation } => self.epoch(node, incarnation),
            Due::Restart { node } => {
                if self.host(node).node.is_none() && !self.host(node).client.starts {
                    self.note(format!("{node} starts as a spare"));
                    let now = self.local(node);
                    self.host(node).last_term = Term(0);
                    self.host(node).node = Some(Node::spare(self.config(node), now));
                }
            }
            Due::TakenOver { node, incarnation } => {
                if self.host(node).incarnation == incarnation {
                    let fails = self.fail_takeovers_percent;
                    let failed = self.dice.chance(fails);
                    self.host(node).taking_over = false;
                    if failed {
                        self.host(node).guest = Guest::Absent;
                        self.deliver(node, Event::TakeoverFailed);
                    } else {
                        self.deliver(node, Event::TakeoverDone);
                        self.at(self.now + EPOCH, Due::Epoch { node, incarnation });
                    }
                }
            }
        }
    }

    pub fn deliver(&mut self, to: NodeId, event: Event) {
        let now = self.local(to);
        match event {
            Event::SpareAcknowledged { node, position } => self.acknowledged(to, node, position),
            Event::StreamClosed { peer, .. } => drop(self.host(to).committed.remove(&peer)),
            _ => {}
        }
        let told = !matches!(event, Event::Tick | Event::Beat(_) | Event::CheckpointTaken(_));
        if self.logs && told {
            self.note(format!("{to} <- {event:?}"));
        }
        let follows = self.hosts[&to].node.as_ref().map(|node| node.status().term);
        if let Event::Committed { term, position } = event
            && follows == Some(term)
        {
            self.host(to).ghost = Some((term, position));
        }
        let Some(node) = self.host(to).node.as_mut() else { return };
        let actions = node.step(now, event);
        self.carry_out(to, actions);
    }

    fn carry_out(&mut self, id: NodeId, actions: Vec<Action>) {
        for action in actions {
            if self.logs && !matches!(action, Action::SendBeat(_)) {
                self.note(format!("{id} -> {action:?}"));
            }
            self.act(id, action);
        }
    }

    fn act(&mut self, id: NodeId, action: Action) {
        match action {
            Action::SendBeat(beat) => self.send_beat(id, beat),
            Action::RequestTerm { term, by } => self.request(id, Wish::Take { term, by }),
            Action::RenewTerm { term, heirs } => self.request(id, Wish::Keep { term, heirs }),
            Action::StartTakeover { term } => self.start_takeover(id, term),
            Action::Join { primary, .. } => {
                self.host(id).wants = Some(primary);
                self.host(id).ghost = self.host(id).ghost.take();
                let delay = self.delay();
                self.at(self.now + delay, Due::Dial { from: id, to: primary });
            }
            Action::AcceptSpare { node, rank, term } => self.accept(id, node, rank, term),
            Action::RefuseSpare(node) => {
                self.at(self.now + 50 * MS, Due::Dial { from: node, to: id });
            }
            Action::DropSpare { node, .. } => {
                self.host(id).committed.remove(&node);
                self.close(id, node, Closed::Goodbye);
            }
            Action::TellMembers(members) => {
                for to in self.spares_of(id) {
                    self.send(id, to, Event::Members(members.clone()));
                }
            }
            Action::AwaitSpares(nodes) => self.await_spares(id, nodes),
            Action::Fence(_) => self.fenced(id),
            Action::TellGuestDied => {
                for to in self.spares_of(id) {
                    self.send(id, to, Event::PrimaryLostGuest(id));
                }
            }
            Action::EndProtection => self.end(id),
            Action::FreezeGuest { .. } => self.freeze(id),
            Action::OfferSwitchover { to, term, position } => {
                self.send(id, to, Event::SwitchoverOffered { from: id, term, position });
            }
            Action::RefuseSwitchover { from } => {
                self.send(id, from, Event::SwitchoverRefused(id));
            }
            Action::ThawGuest { term } => {
                self.reigns(id, term, Epoch(u64::MAX));
                self.host(id).guest = Guest::Runs;
                let incarnation = self.host(id).incarnation;
                self.at(self.now + EPOCH, Due::Epoch { node: id, incarnation });
            }
            Action::Suspect { .. }
            | Action::Trust(_)
            | Action::CannotTakeOver(_)
            | Action::BecomeProtected
            | Action::Suspend
            | Action::Resume
            | Action::BecomeUnprotected
            | Action::AnnounceAgain
            | Action::SwitchoverImpossible => {}
        }
    }

    fn send_beat(&mut self, id: NodeId, beat: Beat) {
        let others: Vec<NodeId> = self.hosts.keys().copied().filter(|to| *to != id).collect();
        for to in others {
            let delay = self.delay();
            if self.connected(id, to) {
                self.at(self.now + delay, Due::Beat { to, beat });
            }
        }
    }

    fn start_takeover(&mut self, id: NodeId, term: Term) {
        let host = self.host(id);
        let (_, position) = host.ghost.expect("took over without a ghost");
        host.taken = position;
        host.guest = Guest::Runs;
        host.taking_over = true;
        host.committed.clear();
        host.awaited.clear();
        host.cuts.clear();
        let incarnation = host.incarnation;
        self.reigns(id, term, position.epoch);
        if self.arbiter != Arbiter::None || !self.ever_cut {
            assert!(term > Term(1), "{term} was given at the start");
            assert!(self.takeovers.iter().all(|(given, _)| *given != term), "{term} given twice");
        }
        self.takeovers.push((term, id));
        let done = self.now + MS + self.dice.below(10 * MS);
        self.at(done, Due::TakenOver { node: id, incarnation });
    }

    pub fn spares_of(&self, id: NodeId) -> Vec<NodeId> {
        self.streams.keys().filter(|(from, _)| *from == id).map(|(_, to)| *to).collect()
    }

    fn dial(&mut self, from: NodeId, to: NodeId) {
        let follows = self.host(from).wants == Some(to) && self.host(from).node.is_some();
        if !follows || self.streams.contains_key(&(to, from)) {
            return;
        }
        if !self.connected(from, to) || self.host(to).node.is_none() {
            return self.at(self.now + 100 * MS, Due::Dial { from, to });
        }
        self.deliver(to, Event::SpareJoined(from));
    }

    fn accept(&mut self, primary: NodeId, spare: NodeId, rank: u32, term: Term) {
        self.order += 1;
        let stream = self.order;
        self.streams.insert((primary, spare), (stream, VecDeque::new()));
        self.streams.insert((spare, primary), (stream, VecDeque::new()));
        self.send(primary, spare, Event::Joined { primary, term, rank, quorum: self.quorum });
        // It takes part from the next checkpoint on.
        self.checkpoint(primary);
    }

    fn send(&mut self, from: NodeId, to: NodeId, event: Event) {
        let delay = self.delay();
        if let Some((stream, messages)) = self.streams.get_mut(&(from, to)) {
            messages.push_back(event);
            let stream = *stream;
            self.at(self.now + delay, Due::Pump { from, to, stream });
        }
    }

    /// Delivers the oldest message of a direction; a cut link holds it back, as TCP does.
    fn pump(&mut self, from: NodeId, to: NodeId, stream: u64) {
        let connected = self.connected(from, to);
        let Some((id, messages)) = self.streams.get_mut(&(from, to)) else { return };
        if *id != stream {
            return;
        }
        if !connected {
            return self.at(self.now + 10 * MS, Due::Pump { from, to, stream });
        }
        let Some(event) = messages.pop_front() else { return };
        match event {
            Event::StreamClosed { .. } => {
                self.streams.remove(&(from, to));
                self.deliver(to, event);
                self.at(self.now + MS, Due::Dial { from: to, to: from });
            }
            Event::Committed { position, .. } => {
                // Once it lets its ghost go it takes no more.
                let follows = |node: &Node| node.status().role == Role::Spare;
                if !self.hosts[&to].node.as_ref().is_some_and(follows) {
                    return;
                }
                self.deliver(to, event);
                self.send(to, from, Event::SpareAcknowledged { node: to, position });
            }
            event => self.deliver(to, event),
        }
    }

    /// `id` closes its end of the stream with `peer`; the peer sees it in order, as `how`.
    fn close(&mut self, id: NodeId, peer: NodeId, how: Closed) {
        self.streams.remove(&(peer, id));
        self.send(id, peer, Event::StreamClosed { peer: id, how });
    }

    /// A wrong bit, say: the spare gives the stream up, if there is one, and dials anew.
    pub fn break_stream(&mut self, primary: NodeId, spare: NodeId) {
        let both = [(primary, spare), (spare, primary)];
        if both.iter().filter(|ends| self.streams.remove(ends).is_some()).count() == 2 {
            self.note(format!("the stream between {primary} and {spare} breaks"));
            self.deliver(spare, Event::StreamClosed { peer: primary, how: Closed::ByUs });
            self.deliver(primary, Event::StreamClosed { peer: spare, how: Closed::ByPeer });
        }
    }

    fn peers_of(&self, id: NodeId) -> BTreeSet<NodeId> {
        let ends = self.streams.keys();
        ends.filter_map(|(from, to)| match (*from == id, *to == id) {
            (true, _) => Some(*to),
            (_, true) => Some(*from),
            (false, false) => None,
        })
        .collect()
    }

    fn fenced(&mut self, id: NodeId) {
        let had = std::mem::replace(&mut self.host(id).guest, Guest::Absent);
        let term = self.hosts[&id].node.as_ref().map_or(Term(0), |node| node.status().term);
        if had != Guest::Absent && self.arbiter != Arbiter::None {
            self.request(id, Wish::GiveUp { term, ended: false });
        }
        for peer in self.peers_of(id) {
            self.close(id, peer, Closed::Goodbye);
        }
    }

    fn end(&mut self, id: NodeId) {
        self.ended = true;
        self.host(id).guest = Guest::Absent;
        for to in self.spares_of(id) {
            self.send(id, to, Event::GuestEnded);
        }
    }

    fn freeze(&mut self, id: NodeId) {
        if self.host(id).guest != Guest::Runs {
            return;
        }
        self.host(id).guest = Guest::Frozen;
        let position = self.checkpoint(id);
        let incarnation = self.host(id).incarnation;
        let done = self.now + self.dice.below(2 * MS);
        let event = match self.dice.chance(self.fail_freezes_percent) {
            true => Event::FreezeFailed,
            false => Event::GuestFrozen(position),
        };
        self.at(done, Due::Event { to: id, incarnation, event });
    }

    fn epoch(&mut self, id: NodeId, incarnation: u64) {
        let host = self.host(id);
        if host.incarnation == incarnation && host.guest == Guest::Runs && host.node.is_some() {
            self.checkpoint(id);
            self.at(self.now + EPOCH, Due::Epoch { node: id, incarnation });
        }
    }

    fn checkpoint(&mut self, id: NodeId) -> Position {
        let taken = self.host(id).taken;
        let position = Position::checkpoint(Epoch(taken.epoch.0 + 1));
        let now = self.local(id);
        self.host(id).taken = position;
        self.host(id).cuts.insert(position.epoch, now);
        self.deliver(id, Event::CheckpointTaken(position));
        let term = self.host(id).node.as_ref().expect("it runs the guest").status().term;
        for to in self.spares_of(id) {
            self.send(id, to, Event::Committed { term, position });
        }
        position
    }

    /// Power cut: nobody is told. Otherwise the kernel closes the dead agent's streams.
    pub fn crash(&mut self, id: NodeId, power_cut: bool, back_after: Option<Nanos>) {
        self.note(format!("{id} dies, power cut: {power_cut}"));
        for peer in self.peers_of(id) {
            if power_cut {
                self.streams.remove(&(id, peer));
            } else {
                self.close(id, peer, Closed::ByPeer);
            }
            self.streams.remove(&(peer, id));
        }
        let host = self.host(id);
        host.node = None;
        host.incarnation += 1;
        host.guest = Guest::Absent;
        host.ghost = None;
        host.wants = None;
        host.taking_over = false;
        host.client = Client::default();
        host.committed.clear();
        host.awaited.clear();
        host.cuts.clear();
        if let Some(after) = back_after {
            self.at(self.now + after, Due::Restart { node: id });
        }
    }

    pub fn cut(&mut self, a: NodeId, b: NodeId) {
        self.note(format!("link {a} {b} cut"));
        self.ever_cut = true;
        self.cut.insert((a.min(b), a.max(b)));
    }

    pub fn cut_arbiter(&mut self, id: NodeId) {
        self.note(format!("{id} cut off from the arbiter"));
        self.ever_cut = true;
        self.arbiter_cut.insert(id);
    }

    pub fn cut_all_from_arbiter(&mut self) {
        self.note("nobody reaches the arbiter".into());
        self.ever_cut = true;
        self.arbiter_cut.extend(self.hosts.keys());
    }

    /// Cut off from everything, as by a dead switch.
    pub fn isolate(&mut self, id: NodeId) {
        for other in self.hosts.keys().copied().filter(|other| *other != id).collect::<Vec<_>>() {
            self.cut(id, other);
        }
        self.cut_arbiter(id);
    }

    pub fn dead(&self) -> Vec<NodeId> {
        let dead = self.hosts.iter().filter(|(_, host)| host.node.is_none());
        dead.map(|(id, _)| *id).collect()
    }

    pub fn heal(&mut self) {
        self.note("healed".into());
        self.cut.clear();
        self.arbiter_cut.clear();
    }

    /// Fenced agents exit and are started again as spares.
    pub fn restart_fenced(&mut self) {
        let fenced: Vec<NodeId> = self.with_role(Role::Fenced);
        for id in fenced {
            self.crash(id, false, Some(10 * MS));
        }
    }

    pub fn with_role(&self, role: Role) -> Vec<NodeId> {
        let plays = |host: &Host| host.node.as_ref().is_some_and(|n| n.status().role == role);
        self.hosts.iter().filter(|(_, host)| plays(host)).map(|(id, _)| *id).collect()
    }

    pub fn primary(&self) -> Option<NodeId> {
        self.with_role(Role::Primary).first().copied()
    }

    pub fn alive(&self) -> Vec<NodeId> {
        let living = self.hosts.iter().filter(|(_, host)| host.node.is_some());
        living.map(|(id, _)| *id).collect()
    }

    pub fn is_ready(&self, id: NodeId) -> bool {
        self.hosts[&id].node.as_ref().is_some_and(|node| node.status().ready)
    }

    pub fn position(&self, id: NodeId) -> Position {
        self.hosts[&id].taken
    }

    pub fn running(&self) -> Vec<NodeId> {
        let runs = self.hosts.iter().filter(|(_, host)| host.guest == Guest::Runs);
        runs.map(|(id, _)| *id).collect()
    }

    pub fn note(&mut self, line: String) {
        if !self.logs {
            return;
        }
        if self.log.len() == 400 {
            self.log.pop_front();
        }
        self.log.push_back(format!("{:>12.3} {line}", self.now as f64 / MS as f64));
    }

    pub fn print_log(&self) {
        for line in &self.log {
            eprintln!("{line}");
        }
    }

    /// What holds at every instant.
    fn check(&mut self) {
        for (id, host) in &mut self.hosts {
            let Some(node) = &host.node else { continue };
            let term = node.status().term;
            assert!(term >= host.last_term, "{id}: term went from {} to {term}", host.last_term);
            host.last_term = term;
        }
        self.check_holders();
        let running = self.running();
        // A cut link may give two. With an arbiter only one of them is heard.
        if self.arbiter == Arbiter::Shared || self.arbiter == Arbiter::None && !self.ever_cut {
            assert!(running.len() <= 1, "the guest runs on {running:?}");
        }
        for id in running {
            let role = self.hosts[&id].node.as_ref().map(|node| node.status().role);
            assert!(matches!(role, Some(Role::Primary | Role::Asking)), "{id} runs as {role:?}");
        }
    }
}
