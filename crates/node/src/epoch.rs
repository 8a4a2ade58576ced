//! One epoch on the primary: pre-copy, stop, take the rest, send.

mod hold_back;
mod takers;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Context;
use hotspare_files::{ChangeSet, ReplicatedDir};
use hotspare_image::{Epoch, NodeId, Position, Term};
use hotspare_kernel::kill_point::{KillPoint, pass};
use hotspare_kernel::realtime::Urgent;
use hotspare_net::takeover::ServiceNetwork;
use hotspare_process::capture::objects::ObjectCapture;
use hotspare_process::capture::{Captured, CheckpointRules};
use hotspare_process::guest::Guest;
use hotspare_process::init::ClockOffsets;
use hotspare_process::objects::capture::DescriptorCapture;
use hotspare_process::objects::error::{ObjectError, ObjectResult};
use hotspare_process::objects::ipc::IpcCapture;
use hotspare_process::objects::socket::SocketCapture;
use hotspare_process::pages::PageRun;
use hotspare_replica::Sender;

use self::hold_back::HeldBack;
use self::takers::Takers;
use crate::alike::{Alike, Told};
use crate::beside::{Beside, GateCut, Taking};
use crate::outgoing::{CHUNK_CHANGES, CHUNK_COPY, Outgoing, PIECE_BYTES, Piece};
use crate::settings::Settings;
use crate::touches::Tracking;

/// Pages that may be left for the pause.
const REST_PAGES: u64 = 512;
/// More than that and the guest is let go again to pre-copy. Doubled each time, up to
/// [`TRIES_MAX`].
const REST_PAGES_MAX: u64 = 2048;
/// How often a guest is let go again for one checkpoint. Then it is held back, see [`hold_back`].
/// If not even that helps it gets its checkpoint all the same, at the price of a long pause.
const TRIES_MAX: u32 = 3;
/// So many pages are copied in a pause at most.
const LEFT_MAX: u64 = REST_PAGES_MAX << TRIES_MAX;
/// Each round makes the guest fault once more for each page that it writes again.
const ROUNDS: u32 = 3;
/// So much of what was copied last before a pause is sent after it: whoever sends takes processors
/// from those whom the guest waits for.
const HELD_BYTES: u64 = 4 << 20;
const READING: &str = "the files that the program uses are being read, to be compared";
/// Of the thread that the stopped guest waits for. Below that of the heartbeats: a host that is
/// silent is replaced.
pub const PAUSE_PRIORITY: i32 = 5;
/// Longest time without a look at what else there is to do.
const SLICE: Duration = Duration::from_millis(20);

/// Takes checkpoints of a guest and hands them to who takes them.
pub struct EpochMaker {
    pub guest: Guest,
    pub objects: Beside,
    pub offsets: ClockOffsets,
    pub names: (String, String),
    pub directories: Vec<ReplicatedDir>,
    pub takers: Takers,
    pub term: Term,
    /// The last epoch that was taken.
    pub epoch: Epoch,
    /// No pre-copy, and every page at every stop: the measure of what the other way is worth.
    pub stop_and_copy: bool,
    /// Bytes sent to each spare when it last acknowledged a checkpoint.
    wire_bytes: BTreeMap<NodeId, u64>,
    /// Of replicated directories, since somebody took the number.
    pub file_bytes: u64,
    alike: Alike,
    /// The guest's address.
    pub network: Option<ServiceNetwork>,
    /// The spare that packets pass through.
    pub through: Option<NodeId>,
    /// How often the guest was let go again for the last checkpoint.
    tries: u32,
    /// Pages of the last checkpoint.
    pages: u64,
    /// Sees what the guest touches, for the store.
    pub tracking: Option<Tracking>,
    /// The next checkpoint is the last one.
    hold: bool,
    /// What leaves the guest waits for checkpoints.
    pub holds_output: bool,
    open: Option<Open>,
}

/// An epoch that has begun to travel.
struct Open {
    position: Position,
    began: Instant,
    pages: u64,
    /// Rounds of pre-copy that have begun, whatever the number of attempts they take.
    rounds: u32,
    /// What the last of them found, in pages.
    found: u64,
    /// Tries that found too much to copy while the guest stood still.
    tries: u32,
    /// Pages that the last of them found.
    left: u64,
    held_back: HeldBack,
    /// What waits for room.
    outgoing: Outgoing,
    /// The guest has been stopped for it; the rest is only to be sent.
    captured: Option<Captured>,
    /// The last packet of the spare in the path that it covers.
    inputs: Option<(NodeId, u64)>,
}

/// What came of an attempt.
pub enum Attempt {
    /// Not yet; go on in a moment.
    Later(Obstacle),
    /// A checkpoint is on its way.
    Taken(Box<Taken>),
}

/// Why there is no checkpoint yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// There is more to do than fits in one go.
    Work,
    /// A spare takes things slower than they come.
    SlowSpare,
    /// So does this host's own disk, which keeps what is to be stored.
    SlowStore,
    /// A state of the guest that passes, in words.
    Passing(String),
}

/// A checkpoint on its way.
pub struct Taken {
    pub position: Position,
    /// When the first try began.
    pub began: Instant,
    pub captured: Captured,
    pub pages: u64,
    /// So long the guest stood still before the pause, in moments, since it writes faster than it
    /// is copied.
    pub held_back: Duration,
}

impl EpochMaker {
    pub fn new(
        guest: Guest,
        settings: &Settings,
        outside: Vec<hotspare_process::objects::outside::OutsideDescriptor>,
        sockets: SocketCapture,
        ipc: IpcCapture,
    ) -> Self {
        let descriptors = DescriptorCapture::new(settings.rules(), outside);
        Self {
            guest,
            objects: Beside::new(ObjectCapture { descriptors, sockets, ipc }),
            offsets: ClockOffsets::default(),
            names: (String::new(), String::new()),
            directories: Vec::new(),
            takers: Takers::default(),
            term: Term(0),
            epoch: Epoch(0),
            stop_and_copy: false,
            wire_bytes: BTreeMap::new(),
            file_bytes: 0,
            alike: Alike::new(settings.rules()),
            network: None,
            through: None,
            tries: 0,
            pages: u64::MAX,
            tracking: None,
            hold: false,
            holds_output: settings.guarantee.is_exact(),
            open: None,
        }
    }

    /// Whether the next checkpoint is the last one: if it succeeds, the guest is cut off and stands
    /// still after it.
    pub fn hold(&mut self, hold: bool) {
        self.hold = hold;
        self.guest.hold_after_checkpoint(hold);
    }

    /// What is under way is lost, and everybody must be told everything.
    fn begin_full(&mut self) {
        match self.open.take() {
            Some(open) => self.takers.abort(open.position),
            None => self.takers.want_full(),
        }
    }

    /// A spare is there that starts from nothing, see [`Takers::add`].
    pub fn join(&mut self, node: NodeId, spare: Sender) {
        self.leave(node);
        self.takers.add(node, spare);
    }

    /// A spare is gone; the way to it.
    pub fn leave(&mut self, node: NodeId) -> Option<Sender> {
        self.wire_bytes.remove(&node);
        self.takers.remove(node)
    }

    /// Tries to take a checkpoint, for a few milliseconds. Spares whose stream is broken drop out
    /// by themselves.
    pub fn attempt(&mut self) -> anyhow::Result<Attempt> {
        if let Some(obstacle) = self.takers.without_room() {
            return Ok(Attempt::Later(obstacle));
        }
        if self.open.is_none() {
            self.begin();
        }
        match self.try_attempt(Instant::now() + SLICE) {
            Ok(attempt) => Ok(attempt),
            Err(ObjectError::Transient { what, reason }) => {
                tracing::debug!(what, reason, "no checkpoint at this instant");
                Ok(Attempt::Later(Obstacle::Passing(format!("{what}: {reason}"))))
            }
            Err(ObjectError::Call(error)) if error.is_died() => {
                Ok(Attempt::Later(Obstacle::Passing(error.to_string())))
            }
            Err(error) => {
                if self.open.as_ref().is_some_and(|open| open.captured.is_some()) {
                    // Part of it is lost, so the next one must not build on it.
                    self.begin_full();
                }
                Err(error).context("take a checkpoint")
            }
        }
    }

    fn begin(&mut self) {
        let position = Position::checkpoint(self.epoch.next());
        let mut outgoing = Outgoing::default();
        self.takers.begin(position, self.term);
        if self.takers.is_full() {
            self.guest.copy_again();
            self.alike.forget();
            for (index, directory) in self.directories.iter().enumerate() {
                let chunks = directory.initial_copy().chunks(PIECE_BYTES as usize);
                outgoing.add_files(index, CHUNK_COPY, chunks);
            }
        }
        let began = Instant::now();
        // What did not help the last time does not help now.
        let tries = self.tries.saturating_sub(1);
        self.open = Some(Open {
            position,
            began,
            pages: 0,
            rounds: 0,
            found: 0,
            tries,
            left: u64::MAX,
            held_back: HeldBack::default(),
            outgoing,
            captured: None,
            inputs: None,
        });
    }

    /// Of a full checkpoint under way: pages that are copied, and all of them as far as is known.
    pub fn copying(&self) -> Option<(u64, u64)> {
        let full = self.takers.is_full();
        let open = self.open.as_ref().filter(|open| full && open.captured.is_none())?;
        Some((open.pages, open.pages + self.guest.backlog_pages()))
    }

    /// Whether some spare has a checkpoint, or may get all of one: what leaves the guest then has
    /// to wait.
    pub fn can_be_replaced(&self) -> bool {
        let whole = self.open.as_ref().is_some_and(|open| open.captured.is_some());
        // In this order: what is not unacknowledged any more has been acknowledged.
        let has = |spare: &Sender| spare.unacknowledged() > 0 || spare.acknowledged().is_some();
        self.takers.spares.values().any(|spare| whole || has(spare))
    }

    /// Bytes sent to a spare since this was last asked.
    pub fn wire_bytes(&mut self, node: NodeId) -> u64 {
        let Some(spare) = self.takers.spares.get(&node) else { return 0 };
        let sent = spare.stats().wire_bytes;
        sent.saturating_sub(self.wire_bytes.insert(node, sent).unwrap_or(0))
    }

    /// Whether a checkpoint has begun that is not on its way yet.
    pub fn is_under_way(&self) -> bool {
        self.open.is_some()
    }

    fn try_attempt(&mut self, until: Instant) -> ObjectResult<Attempt> {
        if self.takers.is_full() && !self.name_files()? {
            return Ok(Attempt::Later(Obstacle::Passing(READING.to_owned())));
        }
        if let Some(obstacle) = self.send_waiting(until)? {
            return Ok(Attempt::Later(obstacle));
        }
        if self.open.as_ref().is_none_or(|open| open.captured.is_none()) {
            if self.guest.needs_preparation() {
                self.guest.prepare()?;
            }
            let outrun = |open: &Open| open.tries >= TRIES_MAX && !open.held_back.in_vain();
            let obstacle = if self.stop_and_copy {
                None
            } else if self.open.as_ref().is_some_and(outrun) {
                // Now already: whatever is done after it lets the guest write again.
                self.flush_files()?;
                self.hold_back()?
            } else {
                self.precopy(until)?
            };
            if let Some(obstacle) = obstacle {
                return Ok(Attempt::Later(obstacle));
            }
            self.flush_files()?;
            pass(KillPoint::Copied);
            if !self.stop_and_take()? {
                return Ok(Attempt::Later(Obstacle::Work));
            }
            pass(KillPoint::Captured);
            if let Some(obstacle) = self.send_waiting(until)? {
                return Ok(Attempt::Later(obstacle));
            }
        }
        if !self.name_files()? {
            return Ok(Attempt::Later(Obstacle::Passing(READING.to_owned())));
        }
        match self.open.take() {
            Some(Open {
                position,
                began,
                pages,
                tries,
                held_back,
                captured: Some(captured),
                inputs,
                ..
            }) => {
                self.tries = tries.min(TRIES_MAX);
                self.pages = pages;
                let held_back = held_back.stood;
                self.takers.end(position, inputs);
                pass(KillPoint::Sent);
                self.epoch = position.epoch;
                Ok(Attempt::Taken(Box::new(Taken { position, began, captured, pages, held_back })))
            }
            _ => Ok(Attempt::Later(Obstacle::Work)),
        }
    }

    /// Tells which files must be alike on a host that goes on with the guest; false while these are
    /// being read.
    fn name_files(&mut self) -> ObjectResult<bool> {
        let captured = self.open.as_ref().and_then(|open| open.captured.as_ref());
        let told = match captured {
            Some(captured) => self.alike.before_end(&captured.checkpoint)?,
            None => self.alike.before_copy(self.guest.processes())?,
        };
        match told {
            Told::Reading => return Ok(false),
            Told::All(files) if files.is_empty() => {}
            Told::All(files) => self.takers.files(&files),
        }
        Ok(true)
    }

    /// Sends what waits, as far as there is time and room.
    fn send_waiting(&mut self, until: Instant) -> ObjectResult<Option<Obstacle>> {
        loop {
            if let Some(obstacle) = self.takers.without_room() {
                return Ok(Some(obstacle));
            }
            let Some(open) = &mut self.open else { return Ok(None) };
            let Some(piece) = open.outgoing.next().map_err(files_failed)? else { return Ok(None) };
            if let Piece::Files(bytes) | Piece::Copies(bytes) = &piece {
                self.file_bytes += bytes.len() as u64;
            }
            let is_rest = open.captured.is_some();
            self.takers.send(&piece);
            if is_rest {
                pass(KillPoint::HalfSent);
            }
            self.guest.pump(&[], Duration::ZERO)?;
            if Instant::now() > until {
                return Ok(Some(Obstacle::Work));
            }
        }
    }

    /// Copies while the guest runs, until little is left or it does not get less. A round goes on
    /// where the last attempt left it: beginning anew each time, a guest that writes more than an
    /// attempt can copy would never be stopped.
    fn precopy(&mut self, until: Instant) -> ObjectResult<Option<Obstacle>> {
        while self.is_worth_a_round()? {
            while self.guest.backlog_pages() > 0 {
                let mut runs = Vec::new();
                self.guest.precopy(PIECE_BYTES, &mut runs)?;
                if let Some(open) = &mut self.open {
                    open.pages += runs.iter().map(PageRun::pages).sum::<u64>();
                    open.outgoing.add_runs(runs);
                }
                let waiting = self.open.as_ref().map_or(0, |open| open.outgoing.page_bytes());
                let obstacle = if waiting > HELD_BYTES {
                    self.send_waiting(until)?
                } else {
                    self.guest.pump(&[], Duration::ZERO)?;
                    (Instant::now() > until).then_some(Obstacle::Work)
                };
                if obstacle.is_some() {
                    return Ok(obstacle);
                }
            }
        }
        Ok(None)
    }

    fn flush_files(&self) -> ObjectResult<()> {
        let mut each = self.directories.iter();
        each.try_for_each(|directory| directory.flush().map_err(files_failed))
    }

    /// Whether to copy before the next stop: what a round or a stop has left, or what a new round
    /// finds.
    fn is_worth_a_round(&mut self) -> ObjectResult<bool> {
        let Some(open) = &mut self.open else { return Ok(false) };
        if self.guest.backlog_pages() > 0 && open.rounds > 0 {
            return Ok(true);
        }
        if open.rounds >= ROUNDS {
            return Ok(false);
        }
        let wanted = self.network.as_ref().and_then(ServiceNetwork::gate);
        let is_wanted = wanted.is_some_and(|gate| gate.wanted().is_some());
        let is_full = self.takers.is_full();
        if is_wanted && self.pages < REST_PAGES && !is_full && open.tries == 0 {
            // Clients wait, and there is as little to copy as the last time.
            return Ok(false);
        }
        self.guest.scan()?;
        if self.guest.untracked_pages() > REST_PAGES {
            // Copied before the stop, and not in it.
            self.guest.prepare()?;
        }
        let found = self.guest.backlog_pages();
        let before = std::mem::replace(&mut open.found, found);
        open.rounds += 1;
        // One that finds as much as the last leaves as much to the stop as if it had not been.
        Ok(found > REST_PAGES && (before == 0 || found <= before / 4 * 3))
    }

    /// Stops the guest and takes the rest; false if it was too much.
    fn stop_and_take(&mut self) -> ObjectResult<bool> {
        self.tracking.iter_mut().for_each(|tracking| tracking.before(&mut self.guest));
        let (captured, changes, inputs) = self.take();
        if let Some(open) = &mut self.open {
            // What was cut is gone from the directories: it goes with this epoch, whatever
            // became of this attempt.
            for (index, change) in changes {
                let chunks = change.into_chunks(PIECE_BYTES as usize);
                open.outgoing.add_files(index, CHUNK_CHANGES, chunks);
            }
        }
        let Some(mut captured) = captured? else {
            let left = self.guest.backlog_pages();
            if let Some(open) = &mut self.open {
                // Letting it go once more may bring the same again.
                let hopeless = left >= std::mem::replace(&mut open.left, left) && left > LEFT_MAX;
                open.tries = if hopeless { TRIES_MAX } else { open.tries + 1 };
            }
            return Ok(false);
        };
        self.tracking.iter_mut().for_each(|tracking| tracking.after(&mut self.guest));
        let Some(open) = &mut self.open else { return Ok(false) };
        let checkpoint = &mut captured.checkpoint;
        self.guest.refresh_flags(checkpoint);
        checkpoint.position = open.position;
        checkpoint.term = self.term;
        checkpoint.names.clone_from(&self.names);
        let clocks = &mut checkpoint.clocks;
        clocks.monotonic_ns = clocks.monotonic_ns.wrapping_add_signed(self.offsets.monotonic_ns);
        clocks.boottime_ns = clocks.boottime_ns.wrapping_add_signed(self.offsets.boottime_ns);
        let runs = std::mem::take(&mut captured.runs);
        open.pages += runs.iter().map(PageRun::pages).sum::<u64>();
        open.outgoing.add_runs(runs);
        open.outgoing.add_state(captured.checkpoint.to_bytes());
        open.captured = Some(captured);
        open.inputs = self.through.map(|node| (node, inputs));
        Ok(true)
    }

    /// A try, what it has cut of which directory, even if it failed, and the last packet of the
    /// spare in the path that it covers.
    fn take(&mut self) -> (ObjectResult<Option<Captured>>, Vec<(usize, ChangeSet)>, u64) {
        let tries = self.open.as_ref().map_or(0, |open| open.tries.min(TRIES_MAX));
        let in_vain = self.open.as_ref().is_some_and(|open| open.held_back.in_vain());
        let epoch = self.epoch.next();
        let holds = self.holds_output;
        let Self { guest, objects, directories, network, hold, takers, .. } = self;
        let mut changes = Vec::new();
        let mut cut = || {
            pass(KillPoint::Stopped);
            for (index, directory) in directories.iter().enumerate() {
                directory.flush().map_err(files_failed)?;
                changes.push((index, directory.cut().map_err(files_failed)?));
            }
            Ok(())
        };
        let gate = network.as_ref().and_then(ServiceNetwork::gate).filter(|_| holds).cloned();
        let close = !takers.spares.is_empty();
        let gate_cut = gate.clone().map(|gate| GateCut { gate, epoch, close, inputs: 0 });
        // A gate is as good: nothing enters, and what leaves later waits for ever.
        let cut_off = network.as_mut().filter(|_| *hold && gate.is_none());
        let mut take = Taking { beside: objects, cut_off, gate: gate_cut };
        let all = self.stop_and_copy;
        let mut rules = CheckpointRules { objects: &mut take, copy_all: all };
        let most = match all || in_vain {
            true => u64::MAX,
            false => REST_PAGES_MAX << tries,
        };
        let urgent = Urgent::begin(PAUSE_PRIORITY);
        let captured = guest.checkpoint(most, &mut rules, &mut cut);
        drop(urgent);
        let inputs = take.gate.as_ref().map_or(0, |cut| cut.inputs);
        match (&gate, &captured) {
            (None, _) => {}
            (Some(gate), Ok(Some(captured))) => {
                gate.covered(epoch, &captured.checkpoint.files);
                if !guest.is_held() {
                    gate.let_in();
                }
            }
            (Some(gate), _) => gate.undo_cut(epoch),
        }
        (captured, changes, inputs)
    }
}

fn files_failed(error: hotspare_files::FilesError) -> ObjectError {
    ObjectError::refused("a replicated directory", error.to_string())
}
