//! Real programs, each with a check that knows whether it went on as if nothing had happened.
//!
//! A [`Program`] runs in one of two ways. Plainly, on one host, undisturbed: that proves the check.
//! Protected: a spare follows, the primary's host is killed at an instant that a seed decides, and
//! the same check must hold for what goes on at the spare.

mod batch;
mod list;
mod load;
mod store;
mod web;
mod words;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use crate::clients::Pace;
use crate::clock::{Instant, millis};
use crate::dice::Dice;
use crate::lab::{LAB_DIR, LabError, Process, SERVICE_CIDR, SERVICE_V4};
use crate::protected::{Committed, Engine, Failover, HANG};
use crate::{Host, Lab};

pub(crate) use self::list::golden;
pub use self::list::{build_examples, by_name, examples_dir, page, programs};

/// The directory that programs write to; replicated when they are protected.
pub const WORK_DIR: &str = "/srv/hotspare-lab/work";

/// A program and how to tell whether it survived.
pub struct Program {
    /// As it is given to `--program`.
    pub name: &'static str,
    /// Commands that must be installed.
    pub needs: &'static [&'static str],
    /// Its command line.
    pub command: Vec<String>,
    /// Where it listens, if it does.
    pub port: u16,
    /// True if it writes files that must survive.
    pub writes: bool,
    /// The kill comes between these spans after protection has begun; for programs that end by
    /// themselves, in the first half of their life.
    pub kill: (Duration, Duration),
    /// Tells whether it survived.
    pub check: Box<dyn Check>,
}

/// How to tell whether a program has survived.
pub trait Check: Send + Sync {
    /// Puts the files that the program reads on a host. The same on every host.
    fn prepare(&self, host: &Host) -> Result<(), LabError>;

    /// Called before the program is started: learns what an undisturbed run gives, if need be.
    fn rehearse(&self, stage: &Stage) -> Result<Box<dyn Watch>, LabError>;
}

/// A program being watched.
pub trait Watch {
    /// Called when the program has been started: loads it, and returns when the load runs.
    fn begin(&mut self, stage: &Stage) -> Result<(), LabError>;

    /// True once the program has shown, after `death`, that it goes on. Waits for that.
    fn goes_on(&mut self, death: Instant) -> bool;

    /// How long the program takes by itself, if it comes to an end by itself: the kill must come
    /// before.
    fn length(&self) -> Option<Duration> {
        None
    }

    /// The end. `ending` is where the program is now, and how its end is noticed.
    fn finish(self: Box<Self>, ending: &Ending<'_>) -> Result<Findings, LabError>;
}

/// Where a program runs.
pub struct Stage {
    /// The lab. Its last host is for reference runs.
    pub lab: Lab,
    /// Where the program is reached.
    pub service: SocketAddr,
    /// Decides everything that is random.
    pub seed: u64,
    /// How patient clients are.
    pub pace: Pace,
    /// The program's command line.
    pub command: Vec<String>,
}

impl Stage {
    /// The host that takes no part, for runs to compare with.
    pub fn reference(&self) -> &Arc<Host> {
        self.lab.hosts().last().expect("a stage has hosts")
    }
}

/// The last part of a run. Without a death the program is where it began.
pub struct Ending<'a> {
    /// The host that the program is on now.
    pub host: &'a Arc<Host>,
    /// The program itself, or the `hotspare` that has it now.
    pub process: &'a Process,
    /// True if the program has changed hosts.
    pub moved: bool,
    /// When the primary was killed, if it was and clients may notice that.
    pub death: Option<Instant>,
    /// What the program had done by then must have survived, as far as is known.
    pub covered: Option<Instant>,
    /// The host where clients run.
    pub client: &'a Host,
    /// Where the program is reached.
    pub service: SocketAddr,
}

impl Ending<'_> {
    /// Waits for the end of the program and gives its exit status.
    pub fn exit_status(&self, at_most: Duration) -> Result<i32, LabError> {
        if self.moved {
            return Engine::guest_ended(self.process, at_most);
        }
        Ok(self.process.wait(at_most)?.code().unwrap_or(-1))
    }
}

/// What a check has found.
#[derive(Clone, Debug, Default)]
pub struct Findings {
    /// What was checked and found good, for people.
    pub facts: Vec<String>,
    /// Broken promises. Empty is what we want.
    pub wrongs: Vec<String>,
}

/// What a run has shown.
#[derive(Clone, Debug)]
pub struct Run {
    /// The program's name.
    pub program: &'static str,
    /// Repeats the run.
    pub seed: u64,
    /// The takeover, if there was one.
    pub failover: Option<Failover>,
    /// From the death to the first sign that it goes on.
    pub outage: Option<Duration>,
    /// What the check says.
    pub findings: Findings,
}

impl Run {
    /// True if nothing was wrong.
    pub fn is_good(&self) -> bool {
        self.findings.wrongs.is_empty()
    }
}

impl std::fmt::Display for Run {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let verdict = if self.is_good() { "ok" } else { "FAILED" };
        write!(f, "{:<15} seed {:<20} {verdict:<6}", self.program, self.seed)?;
        if let Some(parts) = self.failover {
            let Failover { detect_ms, apply_ms, finalise_ms, address_ms, .. } = parts;
            let rest = self.outage.map_or(f64::NAN, millis);
            write!(
                f,
                " outage {rest:.0} ms (detect {detect_ms:.0}, apply {apply_ms:.1}, \
                 finalise {finalise_ms:.1}, address {address_ms:.1})"
            )?;
        }
        for fact in &self.findings.facts {
            write!(f, " {fact};")?;
        }
        for wrong in &self.findings.wrongs {
            write!(f, "\n    wrong: {wrong}")?;
        }
        Ok(())
    }
}

/// How a program comes to its spare.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Its host dies. What it did since the last checkpoint may be lost.
    Death,
    /// Its host dies, and all output had waited for the spare. Nothing that a client knows is
    /// lost, no connection breaks.
    UnnoticedDeath,
    /// `hotspare switchover`. Nothing is lost, no connection breaks.
    Planned,
}

impl Change {
    /// Whether clients may have to connect anew, and find the past.
    fn is_noticed(self) -> bool {
        self == Change::Death
    }

    /// What `hotspare run` needs to be told for it.
    fn arguments(self) -> Vec<String> {
        let words: &[&str] = match self {
            Change::UnnoticedDeath => &["--guarantee", "output-commit"],
            Change::Death | Change::Planned => &[],
        };
        words.iter().map(|word| (*word).to_owned()).collect()
    }
}

/// Commands that a program needs and this machine lacks.
pub fn missing_commands(program: &Program) -> Vec<&'static str> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut dirs: Vec<PathBuf> = std::env::split_paths(&path).collect();
    dirs.push("/usr/sbin".into());
    let is_missing = |command: &&&str| !dirs.iter().any(|dir| dir.join(command).is_file());
    program.needs.iter().filter(is_missing).copied().collect()
}

/// Hosts that are ready for a program: two, and one more for reference runs.
pub(crate) fn stage(
    program: &Program,
    seed: u64,
    change: Option<Change>,
    hosts: usize,
) -> Result<Stage, LabError> {
    let lab = Lab::new(hosts)?;
    for host in lab.hosts() {
        host.empty_dir(WORK_DIR)?;
        program.check.prepare(host)?;
    }
    // The spare gets what is to be replicated from the primary, and from nowhere else.
    lab.host(1).empty_dir(WORK_DIR)?;
    let service = (SERVICE_V4, program.port).into();
    let mut pace = Pace::default();
    if !change.is_some_and(Change::is_noticed) {
        // Clients only wait; a slow machine is no broken promise.
        pace.reply_at_most = HANG;
    }
    Ok(Stage { lab, service, seed, pace, command: program.command.clone() })
}

/// Runs a program on one host to its natural end, or for a second if it has none, and checks it.
pub fn run_plainly(program: &Program, seed: u64) -> Result<Run, LabError> {
    let stage = stage(program, seed, None, 3)?;
    let host = stage.lab.host(0);
    host.add_address(SERVICE_CIDR)?;
    let mut watch = program.check.rehearse(&stage)?;
    let process = start(host, &program.command)?;
    watch.begin(&stage)?;
    watch.goes_on(Instant::now());
    let (client, service) = (stage.lab.client(), stage.service);
    let ending = Ending {
        host,
        process: &process,
        moved: false,
        death: None,
        covered: None,
        client,
        service,
    };
    let findings = watch.finish(&ending)?;
    Ok(Run { program: program.name, seed, failover: None, outage: None, findings })
}

/// Protects a program, changes its host at a random instant, and checks what goes on at the spare.
///
/// How long a program runs that ends by itself is known from a rehearsal only. On a machine that
/// was busier then it may end before that instant: then it is run again with a shorter wait.
pub fn run_with_change(
    program: &Program,
    seed: u64,
    binary: PathBuf,
    epoch: Duration,
    change: Change,
) -> Result<Run, LabError> {
    const HURRIES: [u32; 4] = [1, 2, 4, 8];
    for hurry in HURRIES {
        let stage = stage(program, seed, Some(change), 3)?;
        let replicated = program.writes.then(|| WORK_DIR.to_owned()).into_iter().collect();
        let service_cidr = Some(SERVICE_CIDR.to_owned());
        let binary = binary.clone();
        let more = change.arguments();
        let engine = Engine { binary, epoch, service_cidr, replicated, more };
        if let Some(run) = change_once(program, seed, &stage, &engine, (change, hurry))? {
            return Ok(run);
        }
    }
    Err(LabError::Deadline {
        what: format!("a {} that lives long enough", program.name),
        waited: Duration::ZERO,
    })
}

/// Nothing if the program ended before its host could be changed.
fn change_once(
    program: &Program,
    seed: u64,
    stage: &Stage,
    engine: &Engine,
    (change, hurry): (Change, u32),
) -> Result<Option<Run>, LabError> {
    let (primary_host, spare_host) = (stage.lab.host(0), stage.lab.host(1));
    let mut watch = program.check.rehearse(stage)?;
    let spare = engine.spare(spare_host)?;
    let primary = engine.run(primary_host, &[spare_host], &program.command)?;
    watch.begin(stage)?;
    let begun = Instant::now();
    let ends_by_itself = watch.length().is_some();
    let is_over = || ends_by_itself && Engine::is_over(&primary);
    match Engine::protected(&primary) {
        Err(_) if is_over() => return Ok(None),
        protected => drop(protected?),
    }
    // Else what was put in at the start may be lost as well, and with it all that is compared.
    Engine::committed_since(&primary, begun)?;
    let (least, most) = watch.length().map_or(program.kill, |length| (length / 20, length / 2));
    (Instant::now() + Dice::new(seed).between(least, most) / hurry).sleep_until();
    let changed = change_host(engine, stage, change);
    if is_over() {
        return Ok(None);
    }
    let (since, death, mut facts) = changed?;
    let mut wrongs = Vec::new();
    let (failover, _) = Engine::taken_over(&spare)?;
    let status = primary.wait(HANG)?;
    if change == Change::Planned && !status.success() {
        wrongs.push(format!("the primary ended with {status} after a switchover"));
    }
    let goes_on = watch.goes_on(since);
    let outage = goes_on.then(|| Instant::now().since(since));
    if !goes_on {
        wrongs.push(format!("no sign of life within {HANG:?}"));
    }
    let (client, service) = (stage.lab.client(), stage.service);
    let committed = Committed::of(&primary);
    if committed.last().is_some_and(|last| last > failover.epoch) {
        wrongs.push(format!("{committed:?}, but it went on from epoch {}", failover.epoch));
    }
    let death = death.filter(|_| change.is_noticed());
    let covered = death.and_then(|_| committed.covers(failover.epoch));
    let (host, moved) = (spare_host, true);
    let ending = Ending { host, process: &spare, moved, death, covered, client, service };
    let mut findings = watch.finish(&ending)?;
    findings.wrongs.extend(wrongs);
    facts.append(&mut findings.facts);
    findings.facts = facts;
    Ok(Some(Run { program: program.name, seed, failover: Some(failover), outage, findings }))
}

/// Kills the first host, or moves the guest: since when it does not run there any more, when the
/// host died, and what was said.
fn change_host(
    engine: &Engine,
    stage: &Stage,
    change: Change,
) -> Result<(Instant, Option<Instant>, Vec<String>), LabError> {
    let host = stage.lab.host(0);
    match change {
        Change::Death | Change::UnnoticedDeath => {
            let death = host.kill()?;
            Ok((death, Some(death), Vec::new()))
        }
        Change::Planned => {
            let since = Instant::now();
            let said = host.run(Command::new(&engine.binary).arg("switchover"), HANG)?;
            Ok((since, None, vec![said.trim().to_owned()]))
        }
    }
}

/// Starts a program on a host, plainly.
pub(crate) fn start(host: &Host, command: &[String]) -> Result<Process, LabError> {
    host.spawn(Command::new(&command[0]).args(&command[1..]))
}

/// Writes a file that is private to a host.
pub(crate) fn put(host: &Host, name: &str, bytes: &[u8]) -> Result<(), LabError> {
    host.put(format!("{LAB_DIR}/{name}"), bytes)
}
