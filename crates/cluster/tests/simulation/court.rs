//! The arbiter of a simulated cluster, its clients, and what leaves the guests.
//!
//! The register takes a swap when it arrives, whatever has become of the sender by then. Requests
//! and answers are lost when a host is cut off from it. Clients count on clocks of their own.

use std::collections::{BTreeMap, BTreeSet};

use hotspare_cluster::mutate::{self, Mutation};
use hotspare_cluster::register::{Record, Terms, Verdict, Wish, judge};
use hotspare_cluster::{Claim, Event, Nanos, Node, Role, granted_by_nobody};
use hotspare_image::{Epoch, NodeId, Position, Term};

use super::world::{Arbiter, Due, Guest, LEASE, MS, World};

const GRACE: Nanos = 1_500 * MS;
const PATIENCE: Nanos = 40 * MS;

/// What a host knows of the register, and what it wants.
#[derive(Default)]
pub struct Client {
    wish: Option<Wish>,
    /// The exchange under way.
    exchange: Option<u64>,
    known: bool,
    version: u64,
    record: Option<Record>,
    since: Nanos,
    attempt: Option<(Record, Nanos)>,
    /// Read for this wish.
    just_read: bool,
    /// By the host's clock, as everything here.
    pub lease_until: Nanos,
    lease_at_most: Nanos,
    heirs: BTreeSet<NodeId>,
    at_once: bool,
    /// Of a host that starts the guest anew: the version it waits for the end of.
    waits_for: Option<u64>,
    pub starts: bool,
}

/// What has left the guests.
#[derive(Default)]
pub struct Spoken {
    /// The newest execution that each term has shown to clients.
    last: BTreeMap<Term, Epoch>,
    /// How much a reign knows of what those before it have shown.
    knows: BTreeMap<Term, Epoch>,
    newest: Term,
    holders: BTreeMap<Term, NodeId>,
}

impl World {
    fn terms(&self) -> Terms {
        let (at_once, shared) = (self.arbiter == Arbiter::Commit, self.arbiter == Arbiter::Shared);
        Terms { lease_ns: LEASE, grace_ns: GRACE, at_once, shared }
    }

    pub fn request(&mut self, id: NodeId, wish: Wish) {
        if self.arbiter == Arbiter::None {
            if let Wish::Take { term, .. } = wish {
                self.deliver(id, granted_by_nobody(term));
            }
            return;
        }
        self.host(id).client.wish = Some(wish);
        self.host(id).client.just_read = false;
        self.pursue(id);
    }

    /// Goes on with what a host wants, if nothing is under way.
    fn pursue(&mut self, id: NodeId) {
        let (now, terms) = (self.local(id), self.terms());
        let host = self.host(id);
        let client = &mut host.client;
        let Some(wish) = client.wish.clone().filter(|_| client.exchange.is_none()) else { return };
        let known = client.record.as_ref().map(|record| (record, client.since));
        let verdict = judge(known, id, terms, &wish, now);
        let may_be_old = !client.just_read && !matches!(verdict, Verdict::Write(_));
        if !client.known || may_be_old {
            return self.exchange(id, |exchange| Due::Read { node: id, exchange });
        }
        match verdict {
            Verdict::Write(record) => {
                client.heirs.extend(&record.heirs);
                client.at_once |= record.at_once;
                if record.at_most_ns() == record.lease_ns {
                    client.lease_at_most = client.lease_at_most.min(now + LEASE);
                }
                let same = client.attempt.take().filter(|(before, _)| *before == record);
                let sent = same.map_or(now, |(_, sent)| sent);
                client.attempt = Some((record.clone(), sent));
                client.known = false;
                let version = client.version;
                self.exchange(id, |exchange| Due::Swap { node: id, exchange, version, record });
            }
            Verdict::Denied { held, retry_at } => self.denied(id, &wish, held, retry_at),
            Verdict::Forgotten | Verdict::Done => self.host(id).client.wish = None,
        }
    }

    fn exchange(&mut self, id: NodeId, make: impl FnOnce(u64) -> Due) {
        self.order += 1;
        let exchange = self.order;
        self.host(id).client.exchange = Some(exchange);
        let delay = self.delay();
        if !self.arbiter_cut.contains(&id) {
            self.at(self.now + delay, make(exchange));
        }
        self.at(self.now + PATIENCE, Due::NoAnswer { node: id, exchange });
    }

    pub fn no_answer(&mut self, id: NodeId, exchange: u64) {
        if self.host(id).client.exchange == Some(exchange) {
            self.host(id).client.exchange = None;
            self.host(id).client.known = false;
            self.pursue(id);
        }
    }

    /// A read or a swap arrives at the register.
    pub fn arrive(&mut self, id: NodeId, exchange: u64, swap: Option<(u64, Record)>) {
        if self.arbiter_cut.contains(&id) && self.dice.chance(50) {
            return;
        }
        let swapped = swap.map(|(version, record)| {
            let fits = version == self.version;
            if fits {
                let before = self.register.as_ref().map_or(Term(0), |record| record.term);
                assert!(
                    record.term >= before,
                    "the register went from {before} to {}",
                    record.term
                );
                self.version += 1;
                if self.logs {
                    self.note(format!("register: {record:?}"));
                }
                self.register = Some(record);
                self.notify();
            }
            fits
        });
        let answer = Due::Answer {
            node: id,
            exchange,
            version: self.version,
            record: self.register.clone(),
            swapped,
        };
        let delay = self.delay();
        if !self.arbiter_cut.contains(&id) {
            self.at(self.now + delay, answer);
        }
    }

    fn notify(&mut self) {
        let mut ids: Vec<NodeId> = self.hosts.keys().copied().collect();
        ids.retain(|node| !self.arbiter_cut.contains(node));
        for node in ids {
            let (delay, version, record) =
                (self.delay(), self.version, self.register.clone().expect("just written"));
            self.at(self.now + delay, Due::Noticed { node, version, record });
        }
    }

    pub fn noticed(&mut self, id: NodeId, version: u64, record: Record) {
        let now = self.local(id);
        let client = &mut self.host(id).client;
        if client.attempt.is_none() && client.lease_until == 0 && version > client.version {
            (client.known, client.version, client.record) = (true, version, Some(record));
            client.since = now;
        }
    }

    pub fn answered(
        &mut self,
        id: NodeId,
        exchange: u64,
        version: u64,
        record: Option<Record>,
        swapped: Option<bool>,
    ) {
        let now = self.local(id);
        let client = &mut self.host(id).client;
        if client.exchange != Some(exchange) {
            return;
        }
        client.exchange = None;
        if swapped == Some(true) {
            let (own, sent) = client.attempt.take().expect("it was sent");
            (client.known, client.version, client.record) = (true, version, Some(own.clone()));
            client.since = now;
            return self.written(id, own, sent);
        }
        if swapped.is_none() {
            if client.version != version || client.since == 0 {
                (client.version, client.record, client.since) = (version, record, now);
            }
            (client.known, client.just_read) = (true, true);
            if let Some((own, sent)) = client.attempt.take()
                && client.record.as_ref() == Some(&own)
            {
                return self.written(id, own, sent);
            }
        }
        self.pursue(id);
    }

    fn written(&mut self, id: NodeId, own: Record, sent: Nanos) {
        let client = &mut self.host(id).client;
        if !own.over {
            client.lease_at_most = sent + own.at_most_ns();
            let until = client.lease_until.min(client.lease_at_most);
            client.lease_until = until.max(sent + own.lease_ns);
        }
        (client.heirs, client.at_once) = (own.heirs.clone(), own.at_once);
        let fulfilled = match &client.wish {
            Some(Wish::Take { term, .. }) => own.term == *term,
            Some(Wish::Keep { term, heirs }) => own.term == *term && own.heirs == *heirs,
            Some(Wish::GiveUp { .. }) => own.over,
            None => false,
        };
        if !fulfilled {
            return self.pursue(id);
        }
        client.wish = None;
        let (term, until) = (own.term, client.lease_until);
        if std::mem::take(&mut client.starts) {
            return self.started(id, term, until);
        }
        self.deliver(id, Event::TermGranted { term, until, heirs: own.heirs });
    }

    fn denied(&mut self, id: NodeId, wish: &Wish, held: Term, retry_at: Option<Nanos>) {
        let now = self.local(id);
        let client = &mut self.host(id).client;
        client.wish = None;
        let (version, incarnation) = (client.version, self.host(id).incarnation);
        let client = &mut self.host(id).client;
        match wish {
            Wish::Take { .. } if client.starts => {
                let older = client.waits_for.replace(version);
                let alive = retry_at != Some(now) && older.is_some_and(|older| older != version);
                let Some(at) = retry_at.filter(|_| !alive) else {
                    client.starts = false;
                    return;
                };
                client.known = false;
                let at = self.global(id, at).max(self.now + MS);
                self.at(at, Due::StartAgain { node: id, incarnation, term: held.next() });
            }
            Wish::Take { term, .. } | Wish::Keep { term, .. } => {
                if let Wish::Keep { .. } = wish {
                    client.lease_until = 0;
                }
                self.deliver(id, Event::TermDenied { term: *term, held, retry_at });
            }
            Wish::GiveUp { .. } => {}
        }
    }

    /// The operator starts the guest anew on a host where nothing runs.
    pub fn start_anew(&mut self, id: NodeId) {
        if self.arbiter == Arbiter::None || self.host(id).node.is_some() {
            return;
        }
        self.note(format!("{id} starts the guest anew"));
        let host = self.host(id);
        host.incarnation += 1;
        host.client = Client { starts: true, ..Client::default() };
        let incarnation = host.incarnation;
        self.start_again(id, incarnation, Term(1));
    }

    pub fn start_again(&mut self, id: NodeId, incarnation: u64, term: Term) {
        let host = self.host(id);
        if host.incarnation == incarnation && host.client.starts {
            self.request(id, Wish::Take { term, by: Claim::First });
        }
    }

    fn started(&mut self, id: NodeId, term: Term, until: Nanos) {
        self.note(format!("{id} runs a new guest in term {term}"));
        let now = self.local(id);
        // Whatever was shown before is not known to it, and must be over.
        self.spoken.last.clear();
        self.reigns(id, term, Epoch(0));
        let config = self.config(id);
        let host = self.host(id);
        host.node = Some(Node::reigning(config, now, term, until));
        (host.guest, host.taken, host.last_term) = (Guest::Runs, Position::default(), Term(0));
        host.committed.clear();
        host.awaited.clear();
        host.cuts.clear();
        let incarnation = host.incarnation;
        self.at(self.now + super::world::EPOCH, Due::Epoch { node: id, incarnation });
    }

    /// A reign begins that knows so much of those before it.
    pub fn reigns(&mut self, id: NodeId, term: Term, knows: Epoch) {
        let older = self.spoken.last.range(..term).map(|(_, shown)| *shown).max();
        if self.arbiter == Arbiter::Commit && knows > Epoch(0) {
            let shown = older.unwrap_or(Epoch(0));
            assert!(shown <= knows, "{id} reigns from {knows:?}, clients have seen {shown:?}");
        }
        self.spoken.knows.insert(term, knows);
    }

    /// Spares that have to have what leaves, as the agent knows it: `None` while one is missing.
    fn limit(&mut self, id: NodeId) -> Option<Epoch> {
        let alone = self.spares_of(id).is_empty();
        let host = self.host(id);
        let client = &host.client;
        if mutate::is(Mutation::NoCommit) {
            return Some(host.taken.epoch.next());
        }
        let awaits = client.at_once && !client.heirs.is_empty();
        let awaited = awaits && !mutate::is(Mutation::NoStrike);
        let mut nodes = host.awaited.clone();
        if awaited {
            nodes.extend(&client.heirs);
        }
        if nodes.is_empty() {
            return alone.then(|| host.taken.epoch.next());
        }
        let has = |node: &NodeId| host.committed.get(node).copied();
        // `None` is less than any.
        nodes.iter().map(has).min().flatten()
    }

    /// Output waits for these from now on.
    pub fn await_spares(&mut self, id: NodeId, nodes: BTreeSet<NodeId>) {
        self.host(id).awaited.clone_from(&nodes);
        let term = self.hosts[&id].node.as_ref().map_or(Term(0), |node| node.status().term);
        let shown = self.spoken.last.get(&term).copied().unwrap_or(Epoch(0));
        let event = Event::Awaited { nodes, shown: Position::checkpoint(shown) };
        let incarnation = self.hosts[&id].incarnation;
        self.at(self.now, Due::Event { to: id, incarnation, event });
    }

    /// A spare has acknowledged: that may hold the lease up.
    pub fn acknowledged(&mut self, id: NodeId, node: NodeId, position: Position) {
        self.host(id).committed.insert(node, position.epoch);
        let Some(limit) = self.limit(id) else { return };
        let host = self.host(id);
        let later = host.cuts.split_off(&limit.next());
        let cut = std::mem::replace(&mut host.cuts, later).into_values().next_back();
        let client = &mut host.client;
        if let Some(cut) = cut.filter(|_| client.at_once && !client.heirs.is_empty()) {
            let until = (cut + LEASE).min(client.lease_at_most);
            if until > client.lease_until && client.lease_until > 0 {
                client.lease_until = until;
                self.deliver(id, Event::LeaseExtended(until));
            }
        }
    }

    /// Lets every host say to clients what it may.
    pub fn speak(&mut self) {
        if self.arbiter == Arbiter::None {
            return;
        }
        for id in self.running() {
            let now = self.local(id);
            let Some(node) = &self.hosts[&id].node else { continue };
            let status = node.status();
            let over = now >= self.hosts[&id].client.lease_until;
            if status.role != Role::Primary || over && !mutate::is(Mutation::NoLease) {
                continue;
            }
            if self.hosts[&id].taking_over {
                continue;
            }
            let shown = match self.arbiter {
                Arbiter::Commit => self.limit(id),
                Arbiter::None | Arbiter::Lease | Arbiter::Shared => {
                    let client = &self.hosts[&id].client;
                    let awaits = client.at_once && !client.heirs.is_empty();
                    let awaits = awaits && !mutate::is(Mutation::NoStrike);
                    (!awaits).then(|| self.hosts[&id].taken.epoch.next())
                }
            };
            if let Some(shown) = shown {
                self.shown(id, status.term, shown);
            }
        }
    }

    fn shown(&mut self, id: NodeId, term: Term, shown: Epoch) {
        let newer = self.spoken.knows.range(term.next()..).map(|(_, knows)| *knows).min();
        if self.arbiter == Arbiter::Commit
            && let Some(knows) = newer
        {
            assert!(shown <= knows, "{id} shows {shown:?} of {term}, its heir knows {knows:?}");
        }
        if self.arbiter != Arbiter::Commit {
            let newest = self.spoken.newest;
            assert!(term >= newest, "{id} speaks in {term} after {newest} has");
        }
        self.spoken.newest = self.spoken.newest.max(term);
        let last = self.spoken.last.entry(term).or_insert(shown);
        *last = (*last).max(shown);
    }

    /// One primary for each term.
    pub fn check_holders(&mut self) {
        if self.arbiter == Arbiter::None {
            return;
        }
        for id in self.with_role(Role::Primary) {
            let term = self.hosts[&id].node.as_ref().expect("it has a role").status().term;
            let holder = *self.spoken.holders.entry(term).or_insert(id);
            assert_eq!(holder, id, "{term} has two primaries");
        }
    }
}
