//! The spare: follows a primary, keeps the ghost, takes over.

use std::io::BufReader;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use hotspare_cluster::{Action, CannotTakeOver, Closed, Event, Member, Quorum, SuspectCause};
use hotspare_files::{ReplicatedDir, Role};
use hotspare_image::memory::PageOwner;
use hotspare_image::{Checkpoint, NodeId, Position, Term};
use hotspare_kernel::kill_point::{KillPoint, pass};
use hotspare_net::callers::Callers;
use hotspare_net::relay::Whole;
use hotspare_net::takeover::ServiceNetwork;
use hotspare_process::ghost::copy::GhostMemory;
use hotspare_process::ghost::{Ghost, GhostConfig, clock_offsets};
use hotspare_process::init::{ClockOffsets, InitConfig, WritablePath};
use hotspare_process::lazy::LoaderProgress;
use hotspare_process::pages::{Content, PageRun};
use hotspare_replica::heartbeat::HeartKey;
use hotspare_replica::message::{Refuse, RefuseCode, SwitchoverOffer};
use hotspare_replica::{
    Channel, Goodbye, GoodbyeCode, Greeting, Hello, Incoming, Receiver, Replier, Staged,
    StagedCheckpoint, StagingLimits, closed,
};

use crate::agent::{Agent, Arrived, Joined, Message, Stands, StreamId};
use crate::alike::{Comparison, FilesDiffer};
use crate::arbiter::Holds;
use crate::history::What;
use crate::hooks::Hook;
use crate::kept::Kept;
use crate::link::READ_BYTES;
use crate::mailbox::{Inbox, Place, Room};
use crate::metrics::Counter;
use crate::outgoing::{CHUNK_CHANGES, CHUNK_COPY};
use crate::path::Standing;
use crate::rehearsal::Rehearsal;
use crate::settings::Settings;
use crate::{facts, takeover};

/// Of a piece between the file changes of two epochs, in a stored checkpoint.
const EPOCH_MARK: u8 = 2;
const PATIENCE: Duration = Duration::from_millis(500);
/// Checkpoints that are applied or wait for it; the primary takes fewer rather than more.
const STAGED_MAX: usize = 2;

type SharedReplier = Arc<Mutex<Replier<hotspare_replica::WriteHalf>>>;

/// A stream from a primary that has welcomed us.
struct Welcomed {
    primary: NodeId,
    stream: StreamId,
    version: u32,
    read: hotspare_replica::ReadHalf,
    replier: SharedReplier,
}

/// Plays the spare on a connection until it ends.
pub fn follow(agent: &Agent, channel: Channel) -> anyhow::Result<()> {
    let Welcomed { primary, stream, version, read, replier } = greet(agent, channel)?;
    let read = BufReader::with_capacity(READ_BYTES, read);
    let mut receiver = Receiver::new(read, StagingLimits::default());
    let mut kept = Kept::tell(agent, (stream, version), &replier);
    if let Some(kept) = &kept {
        receiver = receiver.with_keeper(kept.clone());
    }
    let room = Room::new(STAGED_MAX);
    let (mut comparison, mut differ) = (Comparison::default(), None);
    let (text, how) = loop {
        match receiver.next() {
            Ok(Incoming::Files(files)) => {
                if let Err(text) = comparison.compare(files) {
                    say_goodbye(&replier, GoodbyeCode::Files, &text);
                    differ = Some(FilesDiffer(text));
                    break (String::new(), Closed::ByUs);
                }
            }
            Ok(incoming) => {
                tell_changed(agent, &mut comparison);
                match incoming {
                    Incoming::Checkpoint(staged) => {
                        kept.take().iter().for_each(Kept::end);
                        arrived(agent, stream, staged, room.place(), &replier);
                    }
                    incoming => {
                        if let Some(text) = take(agent, (primary, stream), incoming) {
                            break (text, Closed::Goodbye);
                        }
                    }
                }
            }
            Err(error) => {
                let how = closed(&error);
                if how == Closed::ByUs {
                    // Or it would go on sending, and wait for ever.
                    say_goodbye(&replier, GoodbyeCode::Failed, &error.to_string());
                }
                break (error.to_string(), how);
            }
        }
    };
    if agent.detach(stream) {
        agent.brain.tell(Event::StreamClosed { peer: primary, how });
        let said = differ.is_none().then_some(text);
        agent.owner.send(Message::PrimaryOut(stream, said, how));
    }
    differ.map_or(Ok(()), |differ| Err(differ.into()))
}

/// Exchanges greetings and tells everybody who is concerned.
fn greet(agent: &Agent, channel: Channel) -> anyhow::Result<Welcomed> {
    let peer = channel.peer();
    let own = agent.hello();
    let ours = agent.facts.clone();
    let back_off = agent.face().back_off.wait(Instant::now());
    let judge = move |peer: &Hello| match back_off {
        Some(_) => Err(Refuse {
            code: RefuseCode::Busy,
            text: "this spare has lost one ghost after another and pauses before the next".into(),
        }),
        None => facts::judge(&ours, &peer.facts),
    };
    let greeting = Greeting::exchange(channel, &own, judge)?;
    let (channel, welcome, hello) = greeting.join(own.term)?;
    let settings = Settings::from_pairs(&welcome.settings)?;
    let arbiter = agent.arbiter.as_ref();
    settings.require_same_arbiter(arbiter.map(|arbiter| &*arbiter.identity))?;
    if let Some(arbiter) = arbiter {
        arbiter.guest(&settings.guest, Holds::of(&settings));
    }
    let key: HeartKey = welcome
        .heart_key
        .as_slice()
        .try_into()
        .context("the primary gave no key for heartbeats")?;
    agent.set_key(key);
    agent.add_peer(hello.node, std::net::SocketAddr::new(peer.ip(), hello.heart_port));
    if let Some(port) = hello.listen_port {
        let listens = std::net::SocketAddr::new(peer.ip(), port);
        agent.face().listens.insert(hello.node, listens);
    }
    let (read, write, hangup) = channel.split().context("split the stream")?;
    let replier = Arc::new(Mutex::new(Replier::new(write)));
    pass(KillPoint::Joined);
    let (primary, term, rank) = (hello.node, welcome.term, welcome.rank);
    let stream = agent.attach();
    agent.face().callers = settings.service.map(|service| Callers::new(service.address));
    let quorum = settings.commit_on;
    {
        let mut face = agent.face();
        (face.commit_on, face.stands_by) = (quorum, false);
    }
    agent.brain.tell(Event::Joined { primary, term, rank, quorum });
    let joined = Joined { primary, term, settings, replier: replier.clone(), stream, hangup };
    agent.owner.send(Message::Joined(Box::new(joined)));
    let version = welcome.version;
    Ok(Welcomed { primary, stream, version, read, replier })
}

fn say_goodbye(
    replier: &Mutex<Replier<hotspare_replica::WriteHalf>>,
    code: GoodbyeCode,
    text: &str,
) {
    let mut replier = replier.lock().unwrap_or_else(PoisonError::into_inner);
    // A primary that is gone does not hear it.
    let _ = replier.goodbye(&Goodbye { code, text: text.to_owned() });
}

fn tell_changed(agent: &Agent, comparison: &mut Comparison) {
    for path in comparison.look_again() {
        agent.reporter.note(&format!(
            "{} has changed here since it was compared: a takeover would find the new one; make \
             it the same on both hosts",
            path.display()
        ));
    }
}

/// Handles one thing the primary sent; some text if that was a goodbye.
fn take(agent: &Agent, (node, stream): (NodeId, StreamId), incoming: Incoming) -> Option<String> {
    match incoming {
        Incoming::Output(epoch, packet) => {
            if let Some(relay) = agent.stands(stream).and_then(|stands| stands.relay) {
                relay.output(epoch, &packet);
            }
        }
        Incoming::OpenPath => agent.owner.send(Message::OpenPath(stream)),
        Incoming::Packet(packet) => {
            if let Some(callers) = &mut agent.face().callers {
                callers.note(&packet);
            }
        }
        Incoming::Checkpoint(_)
        | Incoming::Aborted(_)
        | Incoming::Files(_)
        | Incoming::Event(_) => {}
        Incoming::Members(entries) => {
            let member = |entry: &hotspare_replica::MemberEntry| Member {
                node: entry.node,
                rank: entry.rank,
                ready: entry.ready,
                stands_by: entry.stands_by.unwrap_or(false),
            };
            agent.keep_peer(node);
            for entry in entries.iter().filter(|entry| entry.node != agent.node) {
                if let Some(address) = entry.heart_address() {
                    agent.add_peer(entry.node, address);
                }
                if let Some(listens) = entry.listens.as_ref().and_then(|at| at.parse().ok()) {
                    agent.face().listens.insert(entry.node, listens);
                }
            }
            let members: Vec<Member> = entries.iter().map(member).collect();
            if let Some(own) = members.iter().find(|member| member.node == agent.node) {
                tell_standing(agent, *own);
            }
            agent.brain.tell(Event::Members(members));
        }
        Incoming::SwitchoverOffer(offer) => agent.owner.send(Message::Offered(node, offer)),
        Incoming::GuestDied => agent.brain.tell(Event::PrimaryLostGuest(node)),
        Incoming::Goodbye(goodbye) => {
            if goodbye.code == hotspare_replica::GoodbyeCode::GuestEnded {
                agent.owner.send(Message::GuestOver(goodbye.text.clone()));
            }
            return Some(goodbye.text);
        }
    }
    None
}

/// Says whether output waits for this spare, where that is not so for all.
fn tell_standing(agent: &Agent, own: Member) {
    let mut face = agent.face();
    let changed = std::mem::replace(&mut face.stands_by, own.stands_by) != own.stands_by;
    let quorum = face.commit_on;
    drop(face);
    if !changed || quorum == Quorum::All {
        return;
    }
    agent.reporter.note(&match own.stands_by {
        true => format!(
            "this spare stands by: output waits for others (--commit-on {quorum}), and it takes \
             over when one of them is gone before the primary is"
        ),
        false => "output waits for this spare from now on: it could take over".to_owned(),
    });
}

/// A checkpoint is whole. If the ghost stands it will be applied, whatever happens to the primary,
/// so clients need not wait for that.
fn arrived(
    agent: &Agent,
    stream: StreamId,
    staged: Box<StagedCheckpoint>,
    place: Place,
    replier: &Mutex<Replier<hotspare_replica::WriteHalf>>,
) {
    pass(KillPoint::Staged);
    let (position, whole) = (staged.position(), Whole::from(&*staged));
    let mut face = agent.face();
    let in_order = face.late == 0 && !staged.is_full();
    let stands = face.stands.clone().filter(|stands| in_order && stands.stream == stream);
    let acknowledged = stands.is_some();
    if !acknowledged {
        face.late += 1;
    }
    // First of all, and before the ghost may be let go: what is acknowledged will be found there.
    agent.owner.send(Message::Checkpoint(Arrived { stream, staged, acknowledged, place }));
    drop(face);
    let Some(stands) = stands else { return };
    if let Some(relay) = stands.relay {
        relay.commit(&whole);
    }
    acknowledge(replier, position);
    pass(KillPoint::Promised);
}

fn acknowledge(replier: &Mutex<Replier<hotspare_replica::WriteHalf>>, position: Position) {
    let mut replier = replier.lock().unwrap_or_else(PoisonError::into_inner);
    // A primary that cannot hear it is gone; the reader will say so.
    let _ = replier.acknowledge(position);
}

/// A spare on the thread that owns the ghost.
pub struct Spare {
    pub agent: Agent,
    pub inbox: Inbox<Message>,
    pub hook: Hook,
    pub following: Option<Joined>,
    pub ghost: Option<Held>,
    /// Why the primary is not trusted, if it is not.
    pub suspected: Option<SuspectCause>,
    /// The term that the primary has offered, of its own will.
    pub offered: Option<Term>,
    /// When the last checkpoint was here.
    pub staged: Option<Instant>,
    /// Rehearsals so far.
    pub rehearsals: u64,
    /// The ghost is of a stored checkpoint, which is so old.
    pub stored: Option<Stale>,
    over: Option<String>,
    /// The guest has ended; what becomes of its primary concerns nobody.
    is_over: bool,
}

/// The ghost is to be let go.
#[derive(Clone, Copy)]
pub struct Decision {
    /// The new reign.
    pub term: Term,
    /// When the brain decided.
    pub at: Instant,
}

/// A checkpoint that has waited in a store.
#[derive(Clone, Debug)]
pub struct Stale {
    /// How long.
    pub age: Duration,
    /// Which store.
    pub from: String,
    /// When somebody wanted it back.
    pub began: Instant,
}

/// A ghost with what belongs to it on this host.
pub struct Held {
    pub ghost: Ghost,
    pub offsets: ClockOffsets,
    pub directories: Vec<ReplicatedDir>,
    pub network: Option<ServiceNetwork>,
    /// Passes packets while the guest runs elsewhere.
    pub relay: Option<Standing>,
    pub settings: Settings,
    /// Mount points of the replicated directories.
    pub mounts: Mounts,
    /// A copy of the ghost is made, or runs.
    pub rehearsal: Option<Rehearsal>,
    /// Memory that comes behind the guest.
    pub late: Option<Arc<LoaderProgress>>,
}

impl Spare {
    /// A spare that follows nobody yet.
    pub fn new(agent: Agent, inbox: Inbox<Message>, hook: Hook) -> Self {
        Self {
            agent,
            inbox,
            hook,
            following: None,
            ghost: None,
            suspected: None,
            offered: None,
            staged: None,
            rehearsals: 0,
            stored: None,
            over: None,
            is_over: false,
        }
    }

    /// Follows until the guest is over, or takes over and goes on as the primary.
    pub fn run(mut self) -> anyhow::Result<u8> {
        // For the day when it is the primary.
        let prepare = hotspare_process::capture::prepare_marks;
        let _ = std::thread::Builder::new().name("marks".into()).spawn(prepare);
        let news = hotspare_kernel::news::News::new()?;
        loop {
            news.wait(&[self.inbox.bell()], PATIENCE)?;
            let mut messages = self.inbox.take().into_iter();
            while let Some(message) = messages.next() {
                if let Some(decision) = self.handle(message)? {
                    self.end_rehearsal("this host takes over");
                    self.catch_up(messages);
                    let primary = takeover::take_over(self, decision)?;
                    return primary.run();
                }
            }
            if let Some(text) = self.over.take() {
                self.agent.reporter.note(&format!("the primary is done: {text}"));
                self.ghost = None;
                let mut face = self.agent.face();
                (face.epoch, face.stands, face.ghost_of) = (0, None, None);
                drop(face);
                self.following = None;
                self.is_over = true;
            }
        }
    }

    /// Applies what has been acknowledged and not come to its turn yet; nothing more is
    /// acknowledged.
    fn catch_up(&mut self, waiting: impl Iterator<Item = Message>) {
        self.agent.face().stands = None;
        let later = self.inbox.take();
        for message in waiting.chain(later) {
            if let Message::Checkpoint(arrived) = message
                && arrived.acknowledged
            {
                self.take_checkpoint(arrived);
            }
        }
    }

    /// Handles a message; a decision if the ghost is to be let go.
    fn handle(&mut self, message: Message) -> anyhow::Result<Option<Decision>> {
        match message {
            Message::Act(action, at) => {
                return Ok(self.act(action).map(|term| Decision { term, at }));
            }
            Message::Joined(joined) => self.join(*joined),
            Message::Checkpoint(arrived) => self.take_checkpoint(arrived),
            Message::OpenPath(stream) => self.open_path(stream),
            Message::Keep(stream, answer) => {
                if let Some(memory) = self.kept_memory(stream) {
                    // Whoever does not wait any more does without.
                    let _ = answer.send(memory);
                }
            }
            Message::Offered(from, SwitchoverOffer { term, position }) => {
                self.offered = Some(term);
                self.agent.brain.tell(Event::SwitchoverOffered { from, term, position });
            }
            Message::PrimaryOut(stream, text, how) => {
                if let Some(joined) = self.following.as_ref().filter(|j| j.stream == stream) {
                    joined.hangup.hang_up();
                    if let Some(text) = text {
                        self.agent.reporter.note(&format!("the stream ended ({how:?}): {text}"));
                    }
                    if matches!(how, Closed::Goodbye | Closed::ByUs) {
                        self.leave_path();
                    }
                }
            }
            Message::GuestOver(text) => self.over = Some(text),
            Message::Switchover(asker, _) => {
                let why = "this host does not run the guest; ask on the host of the primary";
                asker.answer(Err(why.to_owned()));
            }
            Message::Protect { answer, .. } => {
                let _ = answer.send(Err("this host does not run the guest".into()));
            }
            Message::Alive(answer) => answer.store(true, Ordering::Relaxed),
            Message::Rehearse(plan, answer) => self.rehearse(plan, answer),
            Message::Rehearsal(id, step) => self.rehearsal_step(id, &step),
            Message::SpareIn(_)
            | Message::Acknowledged(..)
            | Message::SpareOut(..)
            | Message::SwitchoverRefused(..)
            | Message::PathOpen(..)
            | Message::OutputWaits => {}
        }
        Ok(None)
    }

    /// Follows this stream, unless it is of an older reign than the one followed.
    fn join(&mut self, joined: Joined) {
        if self.following.as_ref().is_some_and(|before| before.term > joined.term) {
            return joined.leave(&self.agent, "this spare follows a newer primary");
        }
        let mut face = self.agent.face();
        face.term = joined.term;
        face.back_off.joined(Instant::now());
        // What the stream before brings is of no use any more.
        face.stands = None;
        drop(face);
        self.leave_path();
        self.is_over = false;
        (self.suspected, self.offered) = (None, None);
        if let Some(before) = self.following.replace(joined) {
            before.hangup.hang_up();
        }
    }

    /// The memory of a ghost of the same guest that an earlier stream has brought.
    fn kept_memory(&self, stream: StreamId) -> Option<GhostMemory> {
        let joined = self.following.as_ref().filter(|joined| joined.stream == stream)?;
        let guest = &joined.settings.guest;
        let of_it = |held: &&Held| held.settings.guest == *guest && held.late.is_none();
        let held = self.ghost.as_ref().filter(of_it)?;
        let memory = held.ghost.memory();
        memory.inspect_err(|error| tracing::debug!(%error, "nothing is kept")).ok()
    }

    /// Where the primary to join listens; the one that dials.
    fn look_for(&self, primary: NodeId) {
        let mut face = self.agent.face();
        face.join = face.listens.get(&primary).copied();
        let known = face.join.is_some();
        drop(face);
        if !known {
            let note = "the primary cannot be dialled (it told no port); waiting for it to dial";
            self.agent.reporter.note(note);
        }
    }

    /// The ghost is of no use any more: leaves the primary, to begin anew.
    fn lose_ghost(&mut self, why: &str) {
        self.agent.face().epoch = 0;
        self.agent.reporter.warn(&format!("the ghost is lost, a new one is wanted: {why}"));
        self.ghost = None;
        self.agent.brain.tell(Event::GhostLost);
        {
            let mut face = self.agent.face();
            face.stands = None;
            face.back_off.lost(Instant::now());
        }
        let Some(joined) = self.following.take() else { return };
        let (peer, how) = (joined.primary, Closed::ByUs);
        joined.leave(&self.agent, &format!("its ghost is lost: {why}"));
        self.agent.brain.tell(Event::StreamClosed { peer, how });
    }

    /// Keeps in the history what has happened to the guest of this ghost.
    pub fn remember(&self, what: What) {
        let guest = self.ghost.as_ref().map_or("-", |held| &held.settings.guest);
        let face = self.agent.face();
        let (term, epoch) = (face.term.0, face.epoch);
        drop(face);
        self.agent.history.note(guest, (term, epoch), what);
    }

    fn act(&mut self, action: Action) -> Option<Term> {
        if matches!(action, Action::CannotTakeOver(_) | Action::Join { .. }) {
            let was_in_path = self.leave_path();
            let joined = self.following.as_ref().filter(|_| was_in_path);
            // If the primary lives after all, it takes the address back and this spare joins anew.
            joined.inspect(|joined| joined.hangup.hang_up());
        }
        let note = |text: String| self.agent.reporter.note(&text);
        match action {
            Action::StartTakeover { term } => return Some(term),
            Action::Suspect { .. }
            | Action::Trust(_)
            | Action::CannotTakeOver(_)
            | Action::Join { .. }
                if self.is_over => {}
            Action::Suspect { cause, .. } => {
                self.suspected = Some(cause);
                self.agent.reporter.warn(&format!("the primary may be dead: {cause:?}"));
            }
            Action::Trust(_) => {
                self.suspected = None;
                note("the primary lives".to_owned());
            }
            Action::CannotTakeOver(why) => {
                let what = match why {
                    CannotTakeOver::StandsBy => ", as output did not wait for it (--commit-on)",
                    _ => "",
                };
                self.agent.reporter.alarm(&format!(
                    "THE PRIMARY IS GONE and this spare must not replace it: {why:?}{what}"
                ));
                self.remember(What::Abandoned { why: format!("{why:?}") });
            }
            Action::RefuseSpare(node) => {
                let mut face = self.agent.face();
                for (_, waiting) in face.waiting.extract_if(.., |(waits, _)| *waits == node) {
                    let _ = waiting.send(None);
                }
            }
            Action::RefuseSwitchover { .. } => {
                self.offered = None;
                if let Some(joined) = &self.following {
                    joined.decline("it has no ghost of that checkpoint");
                }
            }
            Action::Fence(cause) => note(format!("fenced: {cause:?}")),
            Action::Join { primary, .. } => self.look_for(primary),
            Action::SendBeat(_)
            | Action::RequestTerm { .. }
            | Action::RenewTerm { .. }
            | Action::AwaitSpares(_)
            | Action::Suspend
            | Action::Resume
            | Action::AcceptSpare { .. }
            | Action::DropSpare { .. }
            | Action::TellMembers(_)
            | Action::BecomeProtected
            | Action::BecomeUnprotected
            | Action::TellGuestDied
            | Action::EndProtection
            | Action::FreezeGuest { .. }
            | Action::OfferSwitchover { .. }
            | Action::SwitchoverImpossible
            | Action::AnnounceAgain
            | Action::ThawGuest { .. } => {}
        }
        None
    }

    /// Applies a checkpoint. What was not acknowledged when it came is when the ghost has it.
    fn take_checkpoint(&mut self, arrived: Arrived) {
        let Arrived { stream, mut staged, acknowledged, place } = arrived;
        let (position, term, full) = (staged.position(), staged.term(), staged.is_full());
        let staged_at = Instant::now();
        let followed = self.following.as_ref().is_some_and(|joined| joined.stream == stream);
        if followed {
            self.staged = Some(staged_at);
            // The guest runs there.
            self.offered = None;
        }
        let applied = if followed { self.apply(&mut staged) } else { Ok(()) };
        if followed && applied.is_ok() {
            pass(if full { KillPoint::Built } else { KillPoint::Applied });
        }
        let stands = match &applied {
            Ok(()) if followed && !acknowledged => self.acknowledge_late(stream, &staged),
            _ => None,
        };
        drop(place);
        let mut face = self.agent.face();
        if !acknowledged {
            // From here on the next may be acknowledged as it comes, and not before.
            face.late = face.late.saturating_sub(1);
            face.stands = stands.or(face.stands.take());
        }
        if followed && applied.is_ok() {
            face.epoch = position.epoch.0;
            drop(face);
            self.agent.meters.applied(staged_at.elapsed(), full, staged.file_bytes());
            return self.agent.brain.tell(Event::Committed { term, position });
        }
        drop(face);
        if let Err(error) = applied {
            self.lose_ghost(&format!("{error:#}"));
        }
    }

    fn acknowledge_late(&self, stream: StreamId, staged: &StagedCheckpoint) -> Option<Stands> {
        let relay = self.ghost.as_ref().and_then(|held| held.relay.as_ref());
        let relay = relay.map(|standing| Arc::clone(&standing.0));
        if let Some(relay) = &relay {
            relay.commit(&Whole::from(staged));
        }
        let joined = self.following.as_ref()?;
        acknowledge(&joined.replier, staged.position());
        Some(Stands { stream, relay })
    }

    fn apply(&mut self, staged: &mut StagedCheckpoint) -> anyhow::Result<()> {
        let checkpoint = Checkpoint::from_bytes(staged.state())?;
        if staged.is_full() {
            self.ghost = None;
            let settings = &self.following.as_ref().context("nobody is followed")?.settings;
            self.agent.face().ghost_of = Some(settings.guest.clone());
            self.ghost =
                Some(Held::new(&checkpoint, settings.clone(), self.hook.bridge.as_deref())?);
        }
        let held = self.ghost.as_mut().context("there is no ghost to apply it to")?;
        let progress = &self.agent.meters.progress;
        held.apply_files(staged, progress).context("apply file changes")?;
        if staged.is_full() {
            held.ghost.begin_full(&checkpoint)?;
        }
        // One after another: an epoch may be larger than what this host can spare.
        let mut failed = None;
        let mut runs = std::iter::from_fn(|| match staged.next_run() {
            Ok(run) => {
                progress.add(1);
                let run = run.map(page_run);
                if let (Some(rehearsal), Some(run)) = (&held.rehearsal, &run) {
                    rehearsal.run(run);
                }
                run
            }
            Err(error) => {
                failed = Some(error);
                None
            }
        });
        held.ghost.apply(checkpoint, &mut runs)?;
        failed.map_or(Ok(()), |error| Err(error).context("read what was staged"))?;
        if let Some(rehearsal) = &held.rehearsal {
            rehearsal.applied(staged.state());
        }
        Ok(())
    }
}

fn page_run((owner, start, content): (PageOwner, u64, Staged)) -> PageRun {
    let content = match content {
        Staged::Zero(pages) => Content::Zero(pages.into()),
        Staged::Discard(pages) => Content::Discard(pages.into()),
        Staged::Bytes(bytes) => Content::Bytes(bytes),
    };
    PageRun { owner, start, content }
}

impl Held {
    /// An empty ghost, for this checkpoint.
    pub fn new(
        checkpoint: &Checkpoint,
        settings: Settings,
        bridge: Option<&str>,
    ) -> anyhow::Result<Self> {
        let (directories, mounts, writable) = serve_files(&settings, Role::Spare)?;
        let mut init = InitConfig::default();
        init.surroundings.clocks = clock_offsets(checkpoint.clocks);
        init.surroundings.host_name = Some(checkpoint.names.0.clone());
        init.surroundings.writable = writable;
        let offsets = init.surroundings.clocks;
        let config = GhostConfig { init, replicated: settings.replicated() };
        let ghost = Ghost::new(config)?;
        let network = match settings.service {
            Some(service) => {
                let uplink = crate::settings::uplink(bridge, service, &settings)?;
                let net = std::os::fd::AsFd::as_fd(&ghost.namespaces().net);
                Some(ServiceNetwork::prepare(net, service, uplink)?)
            }
            None => None,
        };
        let relay = network.as_ref().and_then(ServiceNetwork::relay).transpose()?;
        let relay = relay.map(|relay| Standing(Arc::new(relay)));
        let rehearsal = None;
        let late = None;
        Ok(Self { ghost, offsets, directories, network, relay, settings, mounts, rehearsal, late })
    }

    fn apply_files(
        &mut self,
        staged: &mut StagedCheckpoint,
        progress: &Counter,
    ) -> anyhow::Result<()> {
        let bytes = staged.file_bytes();
        self.take_files(staged.files(), bytes, progress)
    }

    /// Takes file changes of one epoch, or of several with marks between them.
    pub fn take_files(
        &mut self,
        files: &mut impl std::io::Read,
        bytes: u64,
        progress: &Counter,
    ) -> anyhow::Result<()> {
        let mut sets: Vec<_> = self.directories.iter().map(ReplicatedDir::staging).collect();
        let mut left = bytes;
        while left > 0 {
            let mut head = [0u8; 8];
            files.read_exact(&mut head)?;
            let length = u32::from_le_bytes([head[4], head[5], head[6], head[7]]);
            if u64::from(length) + 8 > left {
                bail!("a piece of {length} bytes does not fit");
            }
            left -= u64::from(length) + 8;
            progress.add(1);
            let mut chunk = vec![0u8; length as usize];
            files.read_exact(&mut chunk)?;
            let index = usize::from(head[0]);
            let directory = self.directories.get(index).context("an unknown directory")?;
            match head[1] {
                CHUNK_COPY => directory.copy_chunk(&chunk)?,
                CHUNK_CHANGES => {
                    sets[index].push_chunk(&chunk)?;
                    if let Some(rehearsal) = &self.rehearsal {
                        rehearsal.changes(head[0], &chunk);
                    }
                }
                EPOCH_MARK if length == 0 => {
                    for (directory, set) in self.directories.iter().zip(&mut sets) {
                        directory.apply(&std::mem::replace(set, directory.staging()))?;
                    }
                }
                other => bail!("an unknown kind of change ({other})"),
            }
        }
        for (directory, set) in self.directories.iter().zip(&sets) {
            directory.apply(set)?;
        }
        Ok(())
    }
}

/// Mount points that are given up when dropped; whoever has them open keeps them.
#[derive(Default)]
pub struct Mounts(Vec<std::path::PathBuf>);

impl Drop for Mounts {
    fn drop(&mut self) {
        for mount in &self.0 {
            let _ = nix::mount::umount2(mount, nix::mount::MntFlags::MNT_DETACH);
            let _ = std::fs::remove_dir(mount);
        }
    }
}

/// Directories that are served, where they are mounted, and what the guest may write.
pub type ServedFiles = (Vec<ReplicatedDir>, Mounts, Vec<WritablePath>);

/// Serves the replicated directories and lists what the guest may write.
pub fn serve_files(settings: &Settings, role: Role) -> anyhow::Result<ServedFiles> {
    let (mut directories, mut writable) = (Vec::new(), Vec::new());
    let mut mounts = Mounts::default();
    for (index, rule) in settings.files.iter().enumerate() {
        let path = &rule.path;
        if !rule.replicated {
            if !std::path::Path::new(path).is_dir() {
                bail!("--files {rule}: there is no directory {path} on this host; mount it first");
            }
            writable.push(WritablePath { source: path.clone(), target: path.clone() });
            continue;
        }
        if role == Role::Primary && !std::path::Path::new(path).is_dir() {
            bail!("--files {rule}: there is no directory {path} on this host; make it first");
        }
        let place = format!("/run/hotspare/{}-{index}", std::process::id());
        std::fs::create_dir_all(&place).with_context(|| format!("make {place}"))?;
        std::fs::create_dir_all(path).with_context(|| format!("make {path}"))?;
        let served = ReplicatedDir::serve(path.as_ref(), place.as_ref(), role);
        directories.push(served.with_context(|| format!("replicate {path}"))?);
        writable.push(WritablePath { source: place.clone(), target: path.clone() });
        mounts.0.push(place.into());
    }
    Ok((directories, mounts, writable))
}
