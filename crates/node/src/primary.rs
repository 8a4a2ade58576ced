//! The primary: runs the guest, checkpoints it, keeps spares.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Context;
use hotspare_cluster::{Action, DropCause, Event, FenceCause, Member};
use hotspare_image::{Epoch, NodeId, Position, Term};
use hotspare_net::gate::GateStats;
use hotspare_net::hook::HookEvent;
use hotspare_net::takeover::ServiceNetwork;
use hotspare_process::init::Init;
use hotspare_replica::message::{SwitchoverOffer, VERSION_OF_PATH};
use hotspare_replica::{Goodbye, GoodbyeCode, MemberEntry};

use crate::agent::{Agent, Message, SpareIn, StreamId};
use crate::door::Door;
use crate::epoch::{Attempt, EpochMaker, Obstacle, Taken};
use crate::history::What;
use crate::hooks::Hook;
use crate::mailbox::Inbox;
use crate::path::Through;
use crate::patience::{Patience, Unheard};
use crate::report::{End, EpochLine};
use crate::rhythm::Rhythm;
use crate::settings::Settings;
use crate::switchover::Switchover;
use crate::touches::Tracking;

/// How soon an attempt that met a passing obstacle is repeated.
const AGAIN: Duration = Duration::from_millis(2);
/// How long the last words to the spares may take.
const LAST_WORDS: Duration = Duration::from_secs(10);

/// A running guest and its protection.
pub struct Primary {
    pub agent: Agent,
    pub inbox: Inbox<Message>,
    pub settings: Settings,
    pub maker: EpochMaker,
    /// PID 1 of the guest; its end is the guest's.
    pub init: Init,
    pub hook: Hook,
    pub door: Door,
    /// How the spares can be reached, by hosts and by us.
    pub reach: BTreeMap<NodeId, Reach>,
    pub switchover: Switchover,
    /// When this host took over, if it did.
    pub since_takeover: Option<Instant>,
    pub sent: BTreeMap<Position, EpochLine>,
    /// The last checkpoint that a spare has acknowledged.
    pub committed: Epoch,
    pub told_refusal: String,
    pub patience: Patience,
    pub rhythm: Rhythm,
    pub unheard: Unheard,
    /// Protection is paused on purpose.
    pub is_paused: bool,
    /// Why the last spare was dropped that was.
    pub dropped: Option<&'static str>,
    /// It has been said that checkpoints do not come.
    pub told_late: bool,
    /// It has been said that the guest writes faster than it is copied.
    pub told_outrun: bool,
    /// When the next checkpoint may be tried, even if output waits.
    pub earliest: Instant,
    /// The spare that packets pass through, or are going to.
    pub through: Option<Through>,
    /// A spare that was, and has the address still.
    pub lent_to: Option<NodeId>,
    /// The spares, as the brain knows them.
    pub members: Vec<Member>,
}

/// How a spare can be reached.
pub struct Reach {
    heart: SocketAddr,
    listens: Option<SocketAddr>,
    pub stream: StreamId,
    version: u32,
    /// It has acknowledged a checkpoint.
    has_ghost: bool,
}

impl Reach {
    /// Its host, as this one sees it.
    pub fn host(&self) -> IpAddr {
        self.heart.ip().to_canonical()
    }
}

impl Primary {
    /// The spare on that host.
    pub fn spare_at(&self, host: IpAddr) -> Option<NodeId> {
        let mut there = self.reach.iter().filter(|(_, reach)| reach.host() == host.to_canonical());
        there.next().map(|(node, _)| *node)
    }

    /// Of a guest that runs, without a spare yet.
    pub fn new(
        agent: Agent,
        inbox: Inbox<Message>,
        settings: Settings,
        maker: EpochMaker,
        init: Init,
        hook: Hook,
    ) -> Self {
        Self {
            rhythm: Rhythm::new(settings.epochs),
            agent,
            inbox,
            settings,
            maker,
            init,
            hook,
            door: Door::default(),
            reach: BTreeMap::new(),
            switchover: Switchover::default(),
            since_takeover: None,
            sent: BTreeMap::new(),
            committed: Epoch(0),
            told_refusal: String::new(),
            patience: Patience::default(),
            unheard: Unheard::default(),
            is_paused: false,
            dropped: None,
            told_late: false,
            told_outrun: false,
            earliest: Instant::now(),
            through: None,
            lent_to: None,
            members: Vec::new(),
        }
    }

    /// Tracks what the guest touches, if somebody keeps it.
    fn track(&self) -> Option<Tracking> {
        let every = self.settings.store.as_ref()?.track;
        let sink = self.maker.takers.store.as_ref()?.touches();
        (!every.is_zero()).then(|| Tracking::start(every, sink, &self.agent.reporter)).flatten()
    }

    /// Runs until the guest has ended or this host must not run it any more. Returns the exit
    /// status.
    pub fn run(mut self) -> anyhow::Result<u8> {
        tracing::debug!(init = %self.init.host_pid(), "the guest runs");
        if self.maker.network.is_some() {
            self.door = Door::watch(&self.init).context("watch the guest's connections begin")?;
        }
        self.maker.takers.store = crate::stored::start(&self.agent, &self.settings);
        self.maker.tracking = self.track();
        let mut next = Instant::now() + self.settings.epoch();
        loop {
            self.open_gate_if_alone();
            self.take_address_back();
            let wait = self.due(next).saturating_duration_since(Instant::now());
            self.maker.guest.pump(&[self.inbox.bell()], wait)?;
            for message in self.inbox.take() {
                if matches!(
                    message,
                    Message::SpareIn(_)
                        | Message::Protect { .. }
                        | Message::Act(Action::FreezeGuest { .. }, _)
                ) {
                    // However long an epoch is: nobody waits for its end.
                    next = Instant::now();
                }
                if let Some(status) = self.handle(message)? {
                    return Ok(status);
                }
            }
            if !self.maker.guest.is_alive() {
                return self.guest_ended();
            }
            if Instant::now() < self.due(next) {
                continue;
            }
            next = Instant::now()
                + match (self.is_freezing(), self.is_frozen()) {
                    (true, _) => self.try_freeze()?,
                    // Its last checkpoint has been taken.
                    (false, true) => self.settings.epoch(),
                    (false, false) => self.take_epoch(),
                };
        }
    }

    /// Takes a checkpoint if somebody wants it; returns how long to wait for the next.
    fn take_epoch(&mut self) -> Duration {
        if let Some(wait) = self.rests() {
            return wait;
        }
        match self.maker.attempt() {
            Ok(Attempt::Later(obstacle)) => {
                let wait = self.meet(&obstacle);
                self.earliest = Instant::now() + wait;
                wait
            }
            Ok(Attempt::Taken(taken)) => {
                self.note_taken(&taken);
                if !std::mem::take(&mut self.told_refusal).is_empty() {
                    self.remember(What::Accepted);
                }
                self.patience.taken();
                self.rhythm.taken(taken.began.elapsed()).max(AGAIN)
            }
            Err(error) => {
                let text = format!("{error:#}");
                if text != self.told_refusal {
                    self.agent
                        .reporter
                        .alarm(&format!("NOT PROTECTED at this time, the guest runs on: {text}"));
                    self.remember(What::Refused { why: text.clone() });
                    self.told_refusal = text;
                }
                self.refused()
            }
        }
    }

    /// Something is in the way of a checkpoint; returns how long to wait.
    fn meet(&mut self, obstacle: &Obstacle) -> Duration {
        let (wait, told) = self.patience.met(obstacle, Instant::now());
        if let Some((done, all)) = self.maker.copying() {
            self.agent.reporter.copying(done, all);
        }
        // Nobody expects a first checkpoint to be quick.
        let first = self.committed == Epoch(0)
            && matches!(obstacle, Obstacle::SlowSpare | Obstacle::SlowStore);
        if let Some(why) = told.filter(|_| !first && !self.is_alone()) {
            self.told_late = true;
            self.agent.reporter.late(&why, self.committed.0);
            self.remember(What::Late { why });
        }
        wait
    }

    /// Notes a checkpoint; when the guest was stopped for it.
    pub fn note_taken(&mut self, taken: &Taken) -> Instant {
        self.agent.brain.tell(Event::CheckpointTaken(taken.position));
        let offset = self.maker.offsets.monotonic_ns;
        let stop = taken.captured.checkpoint.clocks.monotonic_ns.wrapping_add_signed(-offset);
        let line = EpochLine {
            epoch: taken.position.epoch.0,
            parts: taken.captured.parts,
            stop_ns: stop,
            pages: taken.pages,
            bytes: 0,
            lag: 0,
            output: GateStats::default(),
        };
        match self.is_alone() {
            false => drop(self.sent.insert(taken.position, line)),
            // Nobody acknowledges what only the store gets.
            true => self.agent.meters.stopped(&line),
        }
        self.agent.face().epoch = taken.position.epoch.0;
        tracing::debug!(parts = ?taken.captured.parts, "pause");
        if !taken.held_back.is_zero() && !self.told_outrun {
            self.told_outrun = true;
            self.agent.reporter.note(&format!(
                "the guest writes faster than its memory can be copied beside it: it was held \
                 back by {:.0} ms, a few at a time, and stood still for {:.0} ms at once, for this \
                 checkpoint, and will for others; a longer --epoch makes that rarer",
                taken.held_back.as_secs_f64() * 1000.0,
                taken.captured.parts.total.as_secs_f64() * 1000.0
            ));
        }
        let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC);
        let now_ns = now.map_or(0, |now| now.tv_sec() * 1_000_000_000 + now.tv_nsec());
        let age = Duration::from_nanos((now_ns as u64).saturating_sub(stop));
        Instant::now().checked_sub(age).unwrap_or_else(Instant::now)
    }

    fn handle(&mut self, message: Message) -> anyhow::Result<Option<u8>> {
        match message {
            Message::Act(action, _) => return self.act(action),
            Message::SpareIn(spare) => self.spare_in(*spare)?,
            Message::Acknowledged(node, position) => self.acknowledged(node, position),
            Message::SpareOut(node, stream) => {
                if self.reach.get(&node).is_some_and(|reach| reach.stream == stream) {
                    self.leave(node);
                    self.reach.remove(&node);
                }
            }
            Message::PathOpen(node, stream) => self.path_open(node, stream)?,
            Message::SwitchoverRefused(node, why) => self.switchover_refused(node, why),
            Message::Switchover(asker, to) => self.switchover_asked(asker, to),
            Message::Protect { wanted, reason, answer } => self.protect(wanted, &reason, answer),
            Message::Alive(answer) => answer.store(true, Ordering::Relaxed),
            Message::Rehearse(_, answer) => {
                let why = "this host runs the guest: ask on the host of a spare";
                let _ = answer.send(Err(why.into()));
            }
            Message::Rehearsal(..)
            | Message::Offered(..)
            | Message::Joined(_)
            | Message::Checkpoint(_)
            | Message::Keep(..)
            | Message::OpenPath(_)
            | Message::PrimaryOut(..)
            | Message::GuestOver(_)
            | Message::OutputWaits => {}
        }
        Ok(None)
    }

    fn spare_in(&mut self, spare: SpareIn) -> anyhow::Result<()> {
        let SpareIn { heart, listens, stream, version, .. } = spare;
        if self.reach.contains_key(&spare.node) {
            // The end of its stream before is told later, and then no more of its business.
            self.leave(spare.node);
        }
        self.reach.insert(spare.node, Reach { heart, listens, stream, version, has_ghost: false });
        self.door.tell(spare.node, spare.sender.packets());
        self.maker.join(spare.node, spare.sender);
        self.count_spares();
        Ok(())
    }

    pub fn count_spares(&self) {
        self.agent.face().spares = self.maker.takers.all_spares().count();
    }

    /// Whether packets can pass through this spare at all.
    pub fn speaks_of_paths(&self, node: NodeId) -> bool {
        self.reach.get(&node).is_some_and(|reach| reach.version >= VERSION_OF_PATH)
    }

    /// Says of a first checkpoint how much of it the spare had already.
    fn tell_kept(&mut self, node: NodeId) {
        let reach = self.reach.get_mut(&node);
        if reach.is_none_or(|reach| std::mem::replace(&mut reach.has_ghost, true)) {
            return;
        }
        let spare = self.maker.takers.spares.get(&node);
        let pages = spare.map(|spare| spare.stats().pages).unwrap_or_default();
        if pages.kept > 0 {
            self.agent.reporter.note(&format!(
                "spare {node} had {} of {} pages from before: these did not travel",
                pages.kept,
                pages.pages()
            ));
        }
    }

    fn acknowledged(&mut self, node: NodeId, position: Position) {
        self.agent.meters.file_bytes.add(std::mem::take(&mut self.maker.file_bytes));
        self.seek_path();
        self.tell_kept(node);
        let reporter = &self.agent.reporter;
        self.committed = self.committed.max(position.epoch);
        let ready = self.agent.face().ready;
        if let Some(text) = self.unheard.acknowledged(ready, Instant::now()) {
            reporter.note(text);
        }
        if std::mem::take(&mut self.told_late) {
            reporter.protected(position.epoch.0);
            self.agent.remember((self.maker.term, position.epoch.0), What::Protected);
        }
        let newest = self.maker.epoch.0;
        let later = self.sent.split_off(&Position::checkpoint(position.epoch.next()));
        for (at, mut line) in std::mem::replace(&mut self.sent, later) {
            line.lag = newest.saturating_sub(at.epoch.0);
            line.bytes = self.maker.wire_bytes(node);
            line.output = self.maker.gate().map(|gate| gate.take_stats()).unwrap_or_default();
            self.agent.meters.epoch(&line);
            reporter.epoch(&line);
        }
    }

    /// Does what the brain wants; an exit status if this host is done.
    fn act(&mut self, action: Action) -> anyhow::Result<Option<u8>> {
        match action {
            Action::AcceptSpare { node, rank, term } => self.answer(node, Some((rank, term))),
            Action::RefuseSpare(node) => self.answer(node, None),
            Action::DropSpare { node, cause } => {
                self.dropped = Some(drop_text(cause));
                self.agent.meters.dropped(cause);
                let text = drop_text(cause).to_owned();
                self.heir_gone(node, &text);
                if let Some(spare) = self.leave(node) {
                    let _ = spare.goodbye(&Goodbye { code: GoodbyeCode::Dropped, text });
                }
            }
            Action::TellMembers(members) => {
                self.tell_members(&members);
                self.members = members;
            }
            Action::BecomeProtected => {
                self.agent.reporter.protected(self.committed.0);
                self.dropped = None;
                self.remember(What::Protected);
            }
            Action::BecomeUnprotected => self.unprotected(),
            Action::Fence(cause) => return self.fence(cause),
            Action::TellGuestDied => {
                for spare in self.maker.takers.all_spares() {
                    let _ = spare.guest_died();
                }
            }
            Action::EndProtection => {
                self.say_goodbye(GoodbyeCode::GuestEnded, "the guest has ended");
            }
            Action::FreezeGuest { to } => self.freeze(to),
            Action::OfferSwitchover { to, term, position } => {
                self.offer(to, SwitchoverOffer { term, position })?;
            }
            Action::ThawGuest { term } => self.thaw(term)?,
            Action::SwitchoverImpossible => self.switchover_impossible(),
            Action::AnnounceAgain => {
                let announced = |network: &&mut ServiceNetwork| network.is_answering();
                if let Some(network) = self.maker.network.as_mut().filter(announced) {
                    network.announce().context("announce the service address again")?;
                }
            }
            // Packets are not all that it does.
            Action::Suspend if self.settings.writes_shared_files() => {
                return self.fence(FenceCause::LeaseExpired);
            }
            Action::Suspend => self.agent.reporter.note(
                "THE LEASE IS OVER: nothing leaves the guest until the arbiter renews it, or gives \
                 the term to a spare",
            ),
            Action::Resume => {
                self.agent.reporter.note("the lease is renewed: the guest speaks again")
            }
            Action::SendBeat(_)
            | Action::RequestTerm { .. }
            | Action::RenewTerm { .. }
            | Action::AwaitSpares(_)
            | Action::Suspect { .. }
            | Action::Trust(_)
            | Action::CannotTakeOver(_)
            | Action::StartTakeover { .. }
            | Action::Join { .. }
            | Action::RefuseSwitchover { .. } => {}
        }
        Ok(None)
    }

    fn unprotected(&mut self) {
        self.agent.reporter.unprotected();
        let why = match self.dropped.take() {
            Some(why) => why,
            None if self.committed == Epoch(0) => "there is no spare yet",
            None => "the last spare that was ready has gone",
        };
        self.remember(What::Unprotected { why: why.to_owned() });
    }

    fn offer(&mut self, to: NodeId, offer: SwitchoverOffer) -> anyhow::Result<()> {
        if let Some(network) = self.maker.network.as_mut() {
            // What waited for the last checkpoint has left.
            network.withdraw().context("withdraw the service address")?;
        }
        if let Some(spare) = self.maker.takers.spares.get(&to) {
            let _ = spare.offer_switchover(offer);
        }
        Ok(())
    }

    /// Keeps in the history what has happened.
    pub fn remember(&self, what: What) {
        self.agent.remember((self.maker.term, self.committed.0), what);
    }

    pub fn set_term(&mut self, term: Term) {
        self.maker.term = term;
        self.agent.face().term = term;
    }

    fn answer(&mut self, node: NodeId, decision: Option<(u32, Term)>) {
        if let Some((_, term)) = decision {
            self.set_term(term);
        }
        let mut face = self.agent.face();
        for (_, waiting) in face.waiting.extract_if(.., |(waits, _)| *waits == node) {
            let _ = waiting.send(decision);
        }
    }

    fn tell_members(&self, members: &[hotspare_cluster::Member]) {
        let count = |stands_by: bool| {
            let fits =
                |member: &&hotspare_cluster::Member| member.ready && member.stands_by == stands_by;
            members.iter().filter(fits).count()
        };
        let mut face = self.agent.face();
        (face.ready, face.standing_by) = (count(false), count(true));
        drop(face);
        let entry = |member: &hotspare_cluster::Member| {
            let reach = self.reach.get(&member.node);
            MemberEntry {
                node: member.node,
                rank: member.rank,
                ready: member.ready,
                heart: reach.map(|reach| reach.heart.to_string()).unwrap_or_default(),
                listens: reach.and_then(|reach| Some(reach.listens?.to_string())),
                stands_by: Some(member.stands_by),
            }
        };
        let entries: Vec<MemberEntry> = members.iter().map(entry).collect();
        for spare in self.maker.takers.all_spares() {
            let _ = spare.members(&entries);
        }
    }

    fn fence(&mut self, cause: FenceCause) -> anyhow::Result<Option<u8>> {
        if let Some(network) = self.maker.network.as_mut() {
            network.withdraw().context("withdraw the service address")?;
        }
        self.maker.guest.kill();
        let switched = cause == FenceCause::SwitchedOver;
        if switched {
            self.switched_over();
        } else {
            self.answer_asker(Err(format!("this host is primary no longer ({cause:?})")));
        }
        let words = fence_words(cause);
        if switched {
            self.agent.reporter.note(&words);
        } else {
            self.agent.reporter.alarm(&words);
            self.remember(What::Fenced { cause: words });
        }
        self.say_goodbye(GoodbyeCode::SteppedDown, "this host is primary no longer");
        let term = self.maker.term;
        if !switched {
            self.give_up(false);
        }
        self.hook.run(HookEvent::Release, &self.settings, term, &self.agent.reporter);
        Ok(Some(if switched { 0 } else { 75 }))
    }

    /// Our guest is stopped for good; whether the arbiter knows that, if there is one. Nobody
    /// inherits a guest that has `ended`.
    fn give_up(&self, ended: bool) -> bool {
        let arbiter = self.agent.arbiter.as_ref();
        arbiter.is_none_or(|arbiter| arbiter.give_up(self.maker.term, ended))
    }

    fn say_goodbye(&self, code: GoodbyeCode, text: &str) {
        let goodbye = Goodbye { code, text: text.to_owned() };
        for spare in self.maker.takers.all_spares() {
            let _ = spare.goodbye(&goodbye);
        }
    }

    /// Waits until what the spares are to know has left: a spare that does not hear of the guest's
    /// end would take over.
    fn last_words(&self) {
        let deadline = Instant::now() + LAST_WORDS;
        let waiting = || self.maker.takers.all_spares().any(|spare| spare.broken().is_none());
        while waiting() && Instant::now() < deadline {
            std::thread::sleep(AGAIN);
        }
    }

    fn guest_ended(mut self) -> anyhow::Result<u8> {
        let status = self.maker.guest.root_status().unwrap_or(0);
        let code = if libc::WIFEXITED(status) {
            libc::WEXITSTATUS(status) as u8
        } else {
            128 + libc::WTERMSIG(status) as u8
        };
        // A program that the kernel killed (out of memory, kill -9) may go on elsewhere.
        let killed = libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGKILL;
        if killed {
            self.agent.brain.tell(Event::GuestDied);
            for spare in self.maker.takers.all_spares() {
                let _ = spare.guest_died();
            }
            self.say_goodbye(GoodbyeCode::SteppedDown, "the guest was killed");
        } else {
            self.agent.brain.tell(Event::GuestEnded);
            self.say_goodbye(GoodbyeCode::GuestEnded, "the guest has ended");
        }
        let end = End {
            status,
            code,
            goes_on: killed && self.agent.face().ready > 0,
            since_takeover: self.since_takeover.map(|since| since.elapsed()),
        };
        self.agent.reporter.end(&end);
        self.remember(What::Ended { status: code, how: end.to_string() });
        self.answer_asker(Err("the guest has ended".into()));
        self.last_words();
        let nobody_inherits = self.give_up(!killed) && !killed;
        if nobody_inherits && let Some(gate) = self.gate() {
            // Nobody goes on with it: its last words are final.
            gate.open();
        }
        if killed && let Some(network) = self.maker.network.as_mut() {
            network.withdraw().context("withdraw the service address")?;
            let term = self.maker.term;
            self.hook.run(HookEvent::Release, &self.settings, term, &self.agent.reporter);
        }
        drop(self.maker);
        Ok(code)
    }
}

/// Why this host does not run the guest any more, for people.
fn fence_words(cause: FenceCause) -> String {
    let words = match cause {
        FenceCause::SwitchedOver => "the guest runs on the spare now",
        FenceCause::NewerReign(term) => {
            return format!(
                "another host has taken over (term {}): the guest here is stopped, what it did \
                 since then is lost",
                term.0
            );
        }
        FenceCause::LeaseExpired => {
            "the lease is over, as the arbiter was not reached in time: another host may run the \
             guest, so it is stopped here, and what no spare knows of it is lost"
        }
        FenceCause::GuestDied => "the guest was killed; what remains of it is cleared away",
        FenceCause::TakeoverFailed => "this host could not take over: it has no guest",
    };
    words.to_owned()
}

/// Why a spare is dropped, for people.
fn drop_text(cause: DropCause) -> &'static str {
    match cause {
        DropCause::Silent => "the primary does not hear this spare's heartbeats any more",
        DropCause::NeverHeard => {
            "the primary has never heard a heartbeat of this spare: does a firewall drop UDP?"
        }
        DropCause::NewTerm => "the primary goes on in a new term; join again",
    }
}
