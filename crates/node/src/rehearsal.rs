//! `hotspare rehearse`: a copy of the ghost runs, cut off from the world, and is looked at.
//!
//! ```text
//! main thread                     thread `rehearsal`              process `hotspare rehearsal`
//! copies of directories begin ──▶ chunks of them ───────────────▶ files
//! ◀─────────────────── Follow ── they are whole
//! its state, where its memory is ────────────────────────────────▶ a second ghost; reads memory
//! each checkpoint as it applies it ──────────────────────────────▶ waits …
//! ◀─────────────────── Enough ── ◀──────────────────── copied ──── … is applied there as well
//! ◀─────────────────── Over ──── ◀──────────────────── report ──── runs, probe, the end
//! ```
//!
//! The main thread only hands on what it has in hand: checkpoints are acknowledged and applied as
//! ever. It forgets a rehearsal, and kills what belongs to it, at the first sign of something more
//! important: a takeover, a new ghost.

mod probe;
mod report;
pub mod stage;
mod wire;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, BufWriter, ErrorKind, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use hotspare_files::InitialCopy;
use hotspare_image::memory::{MmId, PAGE_BYTES, SharedId};
use hotspare_kernel::{HostPid, pidfd, spawn};
use hotspare_process::pages::PageRun;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

pub use self::report::Report;
use self::wire::{Frame, Orders, Said, Sources, milliseconds};
use crate::agent::{Agent, Message};
use crate::history::What;
use crate::spare::{Held, Spare};

/// What is tried.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// A command for `sh -c` that succeeds if the copy does its work.
    pub probe: Option<String>,
    /// How long the copy runs at least.
    #[serde(with = "milliseconds")]
    pub run: Duration,
    /// How long the probe may take.
    #[serde(with = "milliseconds")]
    pub patience: Duration,
    /// Where files are copied to, if not into memory.
    pub scratch: Option<PathBuf>,
}

/// How long a copy runs, unless said otherwise.
pub const RUN: Duration = Duration::from_secs(1);
/// How long a probe may take, unless said otherwise.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// The longest for either.
pub const LONGEST: Duration = Duration::from_secs(3600);

/// What became of it: a report, or why there was no rehearsal.
pub type Outcome = Result<Report, String>;
/// Who waits for it.
pub type Answer = oneshot::Sender<Outcome>;

/// Which rehearsal of this program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RehearsalId(u64);

/// What the thread that directs one wants of the owner of the ghost.
pub enum Step {
    /// From now on every checkpoint is wanted.
    Follow,
    /// No more of them are.
    Enough,
    /// It is over.
    Over,
}

/// Frames that may wait for the stage, in bytes.
const BACKLOG_MAX: u64 = 256 << 20;
/// The stage answers in this time whatever it is told, and each part of its work is done in it.
const STAGE_PATIENCE: Duration = Duration::from_secs(300);
/// What the copy needs besides the ghost's memory, bytes.
const SPARE_BYTES: u64 = 64 << 20;
/// Size of a piece of a directory's copy, bytes.
const CHUNK_BYTES: usize = 1 << 20;

/// A rehearsal, as the owner of the ghost has it. Dropping it kills what still runs of it.
pub struct Rehearsal {
    id: RehearsalId,
    feed: Sender<Frame>,
    backlog: Arc<AtomicU64>,
    stage: Arc<Stage>,
    memory: Arc<Mutex<Option<Memory>>>,
    /// Checkpoints are handed on.
    follows: bool,
    /// Changes of files are.
    copies: bool,
}

/// The process on the stage, for whoever wants it to end.
#[derive(Default)]
struct Stage(Mutex<Standing>);

#[derive(Default)]
struct Standing {
    /// None before it is started, and once it is about to be waited for.
    process: Option<HostPid>,
    /// Why it is not to go on.
    ended: Option<String>,
}

impl Stage {
    fn lock(&self) -> std::sync::MutexGuard<'_, Standing> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends it at once, with all that belongs to it. The first reason counts.
    fn end(&self, why: &str) {
        let mut standing = self.lock();
        standing.ended.get_or_insert_with(|| why.to_owned());
        if let Some(process) = standing.process {
            let pid = nix::unistd::Pid::from_raw(process.0);
            // Nobody has waited for it, so the number is its own.
            let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
        }
    }

    fn why_ended(&self) -> Option<String> {
        self.lock().ended.clone()
    }
}

impl Drop for Rehearsal {
    fn drop(&mut self) {
        self.stage.end("the ghost that was copied is gone");
    }
}

impl Rehearsal {
    fn send(&self, frame: Frame) {
        let waiting = self.backlog.fetch_add(frame.weight(), Ordering::Relaxed) + frame.weight();
        if waiting > BACKLOG_MAX {
            self.stage.end(
                "the guest writes faster than its ghost is copied: try again when it does less",
            );
            return;
        }
        // A director that has ended wants nothing any more.
        let _ = self.feed.send(frame);
    }

    /// Changes of a replicated directory, before they are applied.
    pub fn changes(&self, directory: u8, chunk: &[u8]) {
        if self.copies {
            self.send(Frame::Changes(directory, chunk.to_vec()));
        }
    }

    /// Pages, before they are written.
    pub fn run(&self, run: &PageRun) {
        if self.follows {
            self.send(Frame::Run(run.clone()));
        }
    }

    /// The ghost has all of a checkpoint.
    pub fn applied(&self, state: &[u8]) {
        if self.follows {
            self.send(Frame::End(state.to_vec()));
        } else if self.copies {
            self.send(Frame::End(Vec::new()));
        }
    }
}

/// What the thread of a rehearsal has.
struct Director {
    agent: Agent,
    id: RehearsalId,
    orders: Orders,
    copies: Vec<(u8, InitialCopy, Vec<u8>)>,
    frames: Receiver<Frame>,
    backlog: Arc<AtomicU64>,
    stage: Arc<Stage>,
    /// What the stage is to copy: kept until it has been told that it may.
    memory: Arc<Mutex<Option<Memory>>>,
}

/// Where the memory of the ghost is.
struct Memory {
    holders: BTreeMap<MmId, HostPid>,
    shared: BTreeMap<SharedId, OwnedFd>,
}

impl Spare {
    /// Begins a rehearsal, if there is something to rehearse.
    pub fn rehearse(&mut self, plan: Plan, answer: Answer) {
        match self.try_rehearse(plan) {
            Ok(director) => {
                let agent = self.agent.clone();
                let guest = director.guest();
                let id = director.id;
                let direct = move || {
                    let outcome = director.direct();
                    conclude(&agent, &guest, &outcome);
                    agent.owner.send(Message::Rehearsal(id, Step::Over));
                    // Whoever asked may be gone.
                    let _ = answer.send(outcome);
                };
                let thread = std::thread::Builder::new().name("rehearsal".into());
                if thread.spawn(direct).is_err() {
                    self.end_rehearsal("no thread can be started");
                }
            }
            Err(error) => drop(answer.send(Err(format!("{error:#}")))),
        }
    }

    fn try_rehearse(&mut self, plan: Plan) -> anyhow::Result<Director> {
        let number = self.rehearsals;
        let Some(held) = &mut self.ghost else { bail!("this spare has no ghost yet") };
        let Some(image) = held.ghost.image() else { bail!("the ghost is not complete yet") };
        if held.rehearsal.is_some() {
            bail!("a rehearsal is under way: wait for it");
        }
        let (monotonic, boottime) = (held.offsets.monotonic_ns, held.offsets.boottime_ns);
        let orders = Orders {
            plan,
            settings: held.settings.to_pairs(),
            clocks: (monotonic, boottime),
            host_name: image.names.0.clone(),
        };
        let mut copies = Vec::new();
        for (index, directory) in (0u8..).zip(&held.directories) {
            let (copy, first) = directory.copy_of_spare().context("copy a directory")?;
            copies.push((index, copy, first));
        }
        let (feed, frames) = channel();
        let (backlog, stage) = (Arc::<AtomicU64>::default(), Arc::<Stage>::default());
        let memory = Arc::<Mutex<Option<Memory>>>::default();
        let id = RehearsalId(number);
        self.rehearsals += 1;
        held.rehearsal = Some(Rehearsal {
            id,
            feed,
            backlog: backlog.clone(),
            stage: stage.clone(),
            memory: memory.clone(),
            follows: false,
            copies: !copies.is_empty(),
        });
        let agent = self.agent.clone();
        Ok(Director { agent, id, orders, copies, frames, backlog, stage, memory })
    }

    /// Does what the director wants.
    pub fn rehearsal_step(&mut self, id: RehearsalId, step: &Step) {
        let Some(held) = &mut self.ghost else { return };
        if held.rehearsal.as_ref().is_none_or(|rehearsal| rehearsal.id != id) {
            return;
        }
        match step {
            Step::Follow => {
                if let Err(error) = begin_to_follow(held) {
                    self.end_rehearsal(&format!("{error:#}"));
                }
            }
            Step::Enough => {
                if let Some(rehearsal) = &mut held.rehearsal {
                    rehearsal.send(Frame::Last);
                    (rehearsal.follows, rehearsal.copies) = (false, false);
                }
            }
            Step::Over => held.rehearsal = None,
        }
    }

    /// Gives a rehearsal up at once, if there is one.
    pub fn end_rehearsal(&mut self, why: &str) {
        let rehearsal = self.ghost.as_mut().and_then(|held| held.rehearsal.take());
        if let Some(rehearsal) = rehearsal {
            rehearsal.stage.end(why);
        }
    }
}

/// From here on the stage gets every checkpoint; what the ghost has by now it reads itself.
fn begin_to_follow(held: &mut Held) -> anyhow::Result<()> {
    let image = held.ghost.image().context("the ghost is empty")?;
    let state = image.to_bytes();
    let shared = held.ghost.duplicate_shared()?;
    let numbers = shared.iter().map(|(id, fd)| (id.0, fd.as_raw_fd())).collect();
    let holders = held.ghost.holders();
    let numbered = holders.iter().map(|(id, host)| (id.0, host.0)).collect();
    let Some(rehearsal) = &mut held.rehearsal else { return Ok(()) };
    let memory = Memory { holders, shared };
    *rehearsal.memory.lock().unwrap_or_else(PoisonError::into_inner) = Some(memory);
    rehearsal.send(Frame::Build(state));
    rehearsal.send(Frame::Sources(Sources { holders: numbered, shared: numbers }));
    rehearsal.follows = true;
    Ok(())
}

/// Remembers how it went, where people look.
fn conclude(agent: &Agent, guest: &str, outcome: &Outcome) {
    let (term, epoch) = {
        let face = agent.face();
        (face.term.0, face.epoch)
    };
    match outcome {
        Ok(report) => {
            let what = What::Rehearsed(Box::new(report.clone()));
            agent.history.note(guest, (term, report.at_epoch), what);
            match report.passed {
                true => agent.reporter.note(&report.words()),
                false => agent.reporter.alarm(&format!(
                    "{}. The ghost is not touched; whether a takeover would succeed is in doubt",
                    report.words()
                )),
            }
        }
        Err(why) => {
            agent.reporter.note(&format!("the rehearsal was given up: {why}"));
            let why = why.clone();
            agent.history.note(guest, (term, epoch), What::NotRehearsed { why });
        }
    }
}

impl Director {
    fn guest(&self) -> String {
        let mut settings = self.orders.settings.iter();
        let name = settings.find(|(name, _)| name == "guest");
        name.map(|(_, guest)| guest.clone()).unwrap_or_default()
    }

    /// From the start of the stage to its end.
    fn direct(mut self) -> Outcome {
        let (mut child, socket) = match self.start() {
            Ok(started) => started,
            Err(error) => return Err(format!("{error:#}")),
        };
        let number = child.id();
        let fed = self.feed(socket);
        self.stage.lock().process = None;
        // With its report it has nothing more to do.
        let _ = child.kill();
        let _ = child.wait();
        if let Some(scratch) = &self.orders.plan.scratch {
            // It does so itself if it can.
            let _ = std::fs::remove_dir_all(stage::scratch_of(scratch, number));
        }
        fed.map_err(|error| self.stage.why_ended().unwrap_or_else(|| format!("{error:#}")))
    }

    fn start(&self) -> anyhow::Result<(Child, UnixStream)> {
        let (ours, theirs) = UnixStream::pair().context("make a pair of sockets")?;
        ours.set_write_timeout(Some(STAGE_PATIENCE))?;
        let own = pidfd::open(HostPid(std::process::id() as i32))?;
        let passed = [OwnedFd::from(theirs), own];
        let mut command = Command::new("/proc/self/exe");
        command.arg("rehearsal").args(passed.each_ref().map(|fd| fd.as_raw_fd().to_string()));
        command.stdin(Stdio::null()).stdout(Stdio::null());
        spawn::pass_descriptors(&mut command, passed.into());
        let mut standing = self.stage.lock();
        if let Some(why) = &standing.ended {
            bail!("{why}");
        }
        let child = command.spawn().context("start the rehearsal")?;
        standing.process = Some(HostPid(child.id() as i32));
        Ok((child, ours))
    }

    /// Tells the stage all it needs, and waits for its report.
    fn feed(&mut self, socket: UnixStream) -> anyhow::Result<Report> {
        let said = listen(socket.try_clone()?)?;
        let mut to = BufWriter::with_capacity(1 << 18, socket);
        let plan = self.orders.plan.clone();
        let orders = Orders {
            plan: plan.clone(),
            settings: std::mem::take(&mut self.orders.settings),
            host_name: std::mem::take(&mut self.orders.host_name),
            clocks: self.orders.clocks,
        };
        Frame::Orders(orders).write(&mut to)?;
        let whole = self.copy_files(&mut to).map(|()| None);
        let whole = or_last_words(whole, &said);
        if let Some(early) = whole? {
            return Ok(early);
        }
        self.want(Step::Follow);
        let copied = or_last_words(self.pass_all(&said, &mut to), &said);
        // What it has not taken by now it does not take.
        self.memory.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(early) = copied? {
            return Ok(early);
        }
        let limit = STAGE_PATIENCE + plan.run + plan.patience;
        match said.recv_timeout(limit) {
            Ok(Said::Report(report)) => Ok(*report),
            Ok(Said::Copied) => bail!("the stage repeats itself"),
            Err(RecvTimeoutError::Timeout) => {
                bail!("nothing was heard of the copy for {} s", limit.as_secs())
            }
            Err(RecvTimeoutError::Disconnected) => bail!("{KILLED}"),
        }
    }

    /// The replicated directories, and what changes in them meanwhile. All copies begin before the
    /// first change is told: it would be lost on one that has not begun.
    fn copy_files(&mut self, to: &mut impl Write) -> anyhow::Result<()> {
        let mut under_way = Vec::new();
        for (index, copy, first) in std::mem::take(&mut self.copies) {
            let mut chunks = copy.chunks(CHUNK_BYTES);
            let begin = chunks.next().context("a copy without a beginning")??;
            Frame::Copy(index, begin).write(to).context(KILLED)?;
            Frame::Changes(index, first).write(to).context(KILLED)?;
            under_way.push((index, chunks));
        }
        Frame::End(Vec::new()).write(to).context(KILLED)?;
        for (index, chunks) in under_way {
            for chunk in chunks {
                let mut frames = vec![Frame::Copy(index, chunk?)];
                frames.extend(self.frames.try_iter().inspect(|frame| self.forget(frame)));
                for frame in frames {
                    frame.write(to).context(KILLED)?;
                }
            }
        }
        Ok(())
    }

    /// It waits no more.
    fn forget(&self, frame: &Frame) {
        self.backlog.fetch_sub(frame.weight(), Ordering::Relaxed);
    }

    fn want(&self, step: Step) {
        self.agent.owner.send(Message::Rehearsal(self.id, step));
    }

    fn pass_on(&self, frame: &Frame, to: &mut impl Write) -> anyhow::Result<()> {
        self.forget(frame);
        if let Frame::Sources(_) = frame {
            self.require_memory()?;
        }
        frame.write(to).context(KILLED)
    }

    /// Passes on what the owner of the ghost has for the stage, up to the last. A report that comes
    /// before that is of a failure.
    fn pass_all(
        &self,
        said: &Receiver<Said>,
        to: &mut BufWriter<UnixStream>,
    ) -> anyhow::Result<Option<Report>> {
        let deadline = Instant::now() + STAGE_PATIENCE;
        loop {
            match said.try_recv() {
                Ok(Said::Copied) => self.want(Step::Enough),
                Ok(Said::Report(report)) => return Ok(Some(*report)),
                Err(std::sync::mpsc::TryRecvError::Empty) => {}
                Err(std::sync::mpsc::TryRecvError::Disconnected) => bail!("{KILLED}"),
            }
            match self.frames.recv_timeout(BEAT) {
                Ok(frame) => {
                    self.pass_on(&frame, to)?;
                    if let Frame::Last = frame {
                        to.flush().context(KILLED)?;
                        return Ok(None);
                    }
                }
                Err(RecvTimeoutError::Timeout) => to.flush().context(KILLED)?,
                Err(RecvTimeoutError::Disconnected) => bail!("the ghost that was copied is gone"),
            }
            if Instant::now() > deadline {
                bail!("the copy was not made within {} s", STAGE_PATIENCE.as_secs());
            }
        }
    }

    /// Fails if the copy would take memory that is not there.
    fn require_memory(&self) -> anyhow::Result<()> {
        let memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(Memory { holders, shared }) = &*memory else { return Ok(()) };
        let own: u64 = holders.values().map(|host| own_bytes(*host)).sum();
        let blocks = |fd: &OwnedFd| nix::sys::stat::fstat(fd).map_or(0, |stat| stat.st_blocks);
        let shared: u64 = shared.values().map(|fd| blocks(fd) as u64 * 512).sum();
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        require_room(own + shared, available_bytes(&meminfo))
    }
}

/// A stage that takes nothing more may have said why before it ended; its end is heard, too.
fn or_last_words(
    passed: anyhow::Result<Option<Report>>,
    said: &Receiver<Said>,
) -> anyhow::Result<Option<Report>> {
    let is_gone = |error: &std::io::Error| {
        matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset)
    };
    let mut causes = passed.as_ref().err().into_iter().flat_map(anyhow::Error::chain);
    if causes.any(|cause| cause.downcast_ref().is_some_and(is_gone)) {
        while let Ok(said) = said.recv_timeout(LAST_WORDS) {
            if let Said::Report(report) = said {
                return Ok(Some(*report));
            }
        }
    }
    passed
}

const KILLED: &str = "the copy was killed, perhaps for want of memory (`dmesg` says so)";
/// How long the end of a stage that takes nothing more may take to be heard.
const LAST_WORDS: Duration = Duration::from_secs(10);
/// How often news of the stage are looked for.
const BEAT: Duration = Duration::from_millis(20);

fn require_room(wanted: u64, available: Option<u64>) -> anyhow::Result<()> {
    let wanted = wanted + SPARE_BYTES;
    let Some(available) = available.filter(|available| *available < wanted) else { return Ok(()) };
    bail!(
        "the copy needs {} MiB of memory, and this host has {} to spare: a rehearsal takes as much \
         as the guest once more",
        wanted >> 20,
        available >> 20
    )
}

/// Bytes of memory that a process has for itself (proc_pid_statm(5): resident, less what is of
/// files).
fn own_bytes(process: HostPid) -> u64 {
    let statm = std::fs::read_to_string(format!("/proc/{process}/statm")).unwrap_or_default();
    let mut numbers = statm.split_ascii_whitespace().skip(1).map(str::parse::<u64>);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(resident)), Some(Ok(shared))) => resident.saturating_sub(shared) * PAGE_BYTES,
        _ => 0,
    }
}

fn available_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kilobytes: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kilobytes << 10)
}

/// Hears what the stage says, on a thread of its own that ends with it.
fn listen(socket: UnixStream) -> std::io::Result<Receiver<Said>> {
    let (tell, said) = channel();
    let hear = move || {
        for line in BufReader::new(socket).lines().map_while(Result::ok) {
            let Ok(heard) = serde_json::from_str(&line) else { return };
            if tell.send(heard).is_err() {
                return;
            }
        }
    };
    std::thread::Builder::new().name("rehearsal-ear".into()).spawn(hear)?;
    Ok(said)
}

/// Rehearses now and then, for as long as the program lives: as soon as there is a ghost, and then
/// each `interval`.
pub fn keep_rehearsing(agent: &Agent, interval: Duration, plan: Plan) -> std::io::Result<()> {
    let agent = agent.clone();
    agent.meters.rehearsal_interval.set(interval.as_millis() as u64);
    let keep = move || {
        loop {
            while agent.face().stands.is_none() {
                std::thread::sleep(LOOK);
            }
            let (answer, outcome) = oneshot::channel();
            agent.owner.send(Message::Rehearse(plan.clone(), answer));
            match outcome.blocking_recv() {
                Ok(Ok(_)) => std::thread::sleep(interval),
                // Not the fault of the ghost; it has its chance when whatever it was is over.
                Ok(Err(_)) => std::thread::sleep(interval.min(SOON)),
                Err(_) => std::thread::sleep(LOOK),
            }
        }
    };
    std::thread::Builder::new().name("rehearsals".into()).spawn(keep).map(drop)
}

/// How often it is looked whether there is a ghost.
const LOOK: Duration = Duration::from_millis(500);
/// How soon a rehearsal that was given up is tried again.
const SOON: Duration = Duration::from_secs(30);

/// A target of the fuzzer: damaged frames to the stage.
#[cfg(test)]
pub fn frame_is_read(seed: u64) -> (bool, u64) {
    use hotspare_image::memory::PageOwner;
    use hotspare_process::pages::Content;
    let mut dice = hotspare_replica::fuzz::Dice(seed);
    let (owner, start) = (PageOwner::Mm(MmId(dice.roll() as u32)), dice.roll());
    let content = match dice.below(3) {
        0 => Content::Zero(dice.roll()),
        1 => Content::Discard(dice.roll()),
        _ => Content::Bytes(dice.bytes(64).into()),
    };
    let frames = [
        Frame::Run(PageRun { owner, start, content }),
        Frame::Changes(dice.roll() as u8, dice.bytes(40)),
        Frame::Last,
    ];
    let mut bytes = Vec::new();
    frames.iter().for_each(|frame| frame.write(&mut bytes).expect("memory takes it"));
    hotspare_replica::fuzz::damage(&mut bytes, &mut dice);
    let (mut from, mut read) = (&bytes[..], 0);
    while Frame::read(&mut from).is_ok() {
        read += 1;
    }
    (read < frames.len() as u64, read)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_that_would_not_fit_is_refused() {
        let meminfo = "MemTotal:  8000 kB\nMemAvailable:   204800 kB\nBuffers: 1 kB\n";
        let available = available_bytes(meminfo);
        assert_eq!(available, Some(200 << 20));
        assert!(require_room(100 << 20, available).is_ok());
        let refused = require_room(137 << 20, available).unwrap_err().to_string();
        assert!(refused.contains("201 MiB") && refused.contains("200 to spare"), "{refused}");
        assert!(require_room(u64::MAX / 2, None).is_ok(), "unknown is no obstacle");
    }

    #[test]
    fn only_the_first_reason_counts() {
        let stage = Stage::default();
        stage.end("a takeover");
        stage.end("the ghost is gone");
        assert_eq!(stage.why_ended().as_deref(), Some("a takeover"));
    }
}
