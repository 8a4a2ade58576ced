//! The `hotspare` program on simulated hosts, and what it says.
//!
//! With `--json` it prints one object a line on its standard output, each with an `event`. The
//! guest's own output may come in between; whatever is no such object is not ours.
//!
//! | event | by | when |
//! | --- | --- | --- |
//! | `protected` | a primary | a spare holds a whole checkpoint |
//! | `epoch` | a primary | a checkpoint is committed |
//! | `failover` | a spare | its ghost runs |
//! | `exit` | a primary | the guest has ended |

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::Host;
use crate::clock::Instant;
use crate::lab::{LabError, Line, Process};

/// Where spares listen.
pub const STREAM_PORT: u16 = 7070;
/// Longest wait for anything that should take milliseconds. A hang, not a measure.
pub const HANG: Duration = Duration::from_secs(60);
/// What agents are told that are not to take anybody for dead soon.
const PATIENT: [&str; 2] = ["--silence", "2s"];

/// What `hotspare --json` says.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event {
    /// A spare holds a whole checkpoint: from here on a failover is possible.
    Protected {
        /// The first committed epoch.
        epoch: u64,
    },
    /// A checkpoint is committed.
    Epoch {
        /// Its number.
        epoch: u64,
        /// How long the guest was stopped for it.
        #[serde(default)]
        pause_us: f64,
        /// CLOCK_MONOTONIC when it was stopped. What it had done by then is safe.
        #[serde(default)]
        stop_ns: u64,
    },
    /// The ghost runs.
    Failover(Failover),
    /// The guest has ended.
    Exit {
        /// Its exit status, as a shell gives it.
        status: i32,
    },
}

/// A takeover, as the new primary tells it.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Failover {
    /// From the last sign of life of the primary to the decision.
    pub detect_ms: f64,
    /// Until the checkpoints that had arrived by then were applied.
    pub apply_ms: f64,
    /// From there to a ghost that is ready to run.
    pub finalise_ms: f64,
    /// Taking the service address and letting go.
    pub address_ms: f64,
    /// The checkpoint that it runs from.
    pub epoch: u64,
    /// The new primary's term.
    #[serde(default)]
    pub term: u64,
}

/// The event in a line, if there is one.
pub fn event(line: &Line) -> Option<Event> {
    line.text.starts_with('{').then(|| serde_json::from_str(&line.text).ok())?
}

/// How guests are protected.
#[derive(Clone, Debug)]
pub struct Engine {
    /// The `hotspare` program.
    pub binary: PathBuf,
    /// Between two checkpoints.
    pub epoch: Duration,
    /// The guest's address with its prefix, if it has one.
    pub service_cidr: Option<String>,
    /// Directories to replicate.
    pub replicated: Vec<String>,
    /// More arguments of `run`.
    pub more: Vec<String>,
}

impl Engine {
    /// The `hotspare` of this build: `$HOTSPARE_BIN`, or the one next to this program.
    pub fn built() -> Option<PathBuf> {
        if let Some(path) = std::env::var_os("HOTSPARE_BIN") {
            return Some(path.into());
        }
        let program = std::env::current_exe().ok()?;
        let built = |dir: &Path| Some(dir.join("hotspare")).filter(|path| path.is_file());
        program.ancestors().skip(1).take(2).find_map(built)
    }

    /// Starts a spare; returns when it listens.
    pub fn spare(&self, host: &Host) -> Result<Process, LabError> {
        self.spare_with(host, &[])
    }

    /// For where it does not matter how soon a death is noticed: a host that the machine below does
    /// not run for a moment is not taken for dead. Goes with [`Engine::patient_spare`].
    pub fn patient(mut self) -> Engine {
        self.more.extend(PATIENT.map(str::to_owned));
        self
    }

    /// Starts a spare of [`Engine::patient`].
    pub fn patient_spare(&self, host: &Host) -> Result<Process, LabError> {
        self.spare_with(host, &PATIENT)
    }

    /// Starts a spare with more arguments; returns when it listens.
    pub fn spare_with(&self, host: &Host, more: &[&str]) -> Result<Process, LabError> {
        let mut command = Command::new(&self.binary);
        let address = host.socket(STREAM_PORT);
        command.args(["spare", "--json", "--insecure", "--listen", &address.to_string()]);
        command.args(more);
        let process = host.spawn_agent(&mut command)?;
        wait_for_listener(&process, STREAM_PORT, HANG)?;
        Ok(process)
    }

    /// Starts `guest` with these spares. It may not be protected yet: see [`Engine::protected`].
    pub fn run(
        &self,
        host: &Host,
        spares: &[&Host],
        guest: &[String],
    ) -> Result<Process, LabError> {
        let mut command = Command::new(&self.binary);
        command.args(["run", "--json", "--insecure"]);
        command.arg("--epoch").arg(format!("{}ms", self.epoch.as_millis()));
        for spare in spares {
            command.arg("--spare").arg(spare.socket(STREAM_PORT).to_string());
        }
        if let Some(cidr) = &self.service_cidr {
            command.args(["--service-address", cidr]);
        }
        for path in &self.replicated {
            command.arg("--files").arg(format!("replicate:{path}"));
        }
        command.args(&self.more).arg("--").args(host.moves_to_its_processors()).args(guest);
        for spare in spares {
            spare.bring_for(&command)?;
        }
        host.spawn_agent(&mut command)
    }

    /// A number in the status of the only agent on a host.
    pub fn status(host: &Host, binary: &Path, name: &str) -> Option<u64> {
        let mut command = Command::new(binary);
        let said = host.run(command.args(["status", "--json"]), HANG).ok()?;
        let status: serde_json::Value = serde_json::from_str(said.lines().next()?).ok()?;
        status[name].as_u64()
    }

    /// Waits until a spare could take over from `primary`; fails if the guest ends before that.
    pub fn protected(primary: &Process) -> Result<u64, LabError> {
        let epoch = |line: &Line| match event(line)? {
            Event::Protected { epoch } => Some(Some(epoch)),
            Event::Exit { .. } => Some(None),
            Event::Epoch { .. } | Event::Failover(_) => None,
        };
        let found = primary.stdout().find(HANG, epoch).flatten();
        found.ok_or_else(|| missing("protection", primary))
    }

    /// Waits until what the guest of `primary` has done by `instant` is safe, or it has ended.
    pub fn committed_since(primary: &Process, instant: Instant) -> Result<(), LabError> {
        let is_since = |line: &Line| match event(line)? {
            Event::Epoch { stop_ns, .. } => (primary.instant(stop_ns) > instant).then_some(()),
            Event::Exit { .. } => Some(()),
            Event::Protected { .. } | Event::Failover(_) => None,
        };
        let found = primary.stdout().find(HANG, is_since);
        found.ok_or_else(|| missing("a checkpoint", primary))
    }

    /// Whether `primary` has said that its guest has come to its good end by itself.
    pub fn is_over(primary: &Process) -> bool {
        let is_end = |line: &Line| event(line) == Some(Event::Exit { status: 0 });
        primary.stdout().lines().iter().any(is_end)
    }

    /// Whether `primary` has said that a spare could take over.
    pub fn is_protected(primary: &Process) -> bool {
        let is_start = |line: &Line| matches!(event(line), Some(Event::Protected { .. }));
        primary.stdout().lines().iter().any(is_start)
    }

    /// Whether the last word of `primary` on that was that a spare could take over, if it has said
    /// anything.
    pub fn last_protection(primary: &Process) -> Option<bool> {
        let said = |line: &Line| match &*line.text {
            text if text.contains(r#""event":"protected""#) => Some(true),
            text if text.contains(r#""event":"unprotected""#) => Some(false),
            _ => None,
        };
        primary.stdout().last(said)
    }

    /// Whether `spare` has said that it has taken over.
    pub fn has_taken_over(spare: &Process) -> bool {
        let is_failover = |line: &Line| matches!(event(line), Some(Event::Failover(_)));
        spare.stdout().lines().iter().any(is_failover)
    }

    /// Waits until `spare` has taken over.
    pub fn taken_over(spare: &Process) -> Result<(Failover, Instant), LabError> {
        let failover = |line: &Line| match event(line)? {
            Event::Failover(failover) => Some((failover, line.at)),
            Event::Protected { .. } | Event::Epoch { .. } | Event::Exit { .. } => None,
        };
        spare.stdout().find(HANG, failover).ok_or_else(|| missing("a failover", spare))
    }

    /// Waits until `spare`, which has taken over, says that the guest has ended.
    pub fn guest_ended(spare: &Process, at_most: Duration) -> Result<i32, LabError> {
        let status = |line: &Line| match event(line)? {
            Event::Exit { status } => Some(status),
            Event::Protected { .. } | Event::Epoch { .. } | Event::Failover(_) => None,
        };
        let ended = spare.stdout().find(at_most, status);
        ended.ok_or_else(|| missing("the end of the guest", spare))
    }
}

/// What a primary has said of its committed checkpoints.
#[derive(Clone, Debug, Default)]
pub struct Committed {
    /// Epochs and when the guest was stopped for them, in order.
    stops: Vec<(u64, Instant)>,
}

impl Committed {
    /// From the output of a primary so far.
    pub fn of(primary: &Process) -> Committed {
        let stop = |line: &Line| match event(line)? {
            Event::Epoch { epoch, stop_ns, .. } => {
                // Of none, where nothing was said.
                let at = if stop_ns > 0 { primary.instant(stop_ns) } else { Instant(0) };
                Some((epoch, at))
            }
            Event::Protected { .. } | Event::Failover(_) | Event::Exit { .. } => None,
        };
        Committed { stops: primary.stdout().lines().iter().filter_map(stop).collect() }
    }

    /// The last epoch that is said to be committed.
    pub fn last(&self) -> Option<u64> {
        self.stops.last().map(|(epoch, _)| *epoch)
    }

    /// What the guest had done by this instant is part of `epoch`, as far as is known.
    pub fn covers(&self, epoch: u64) -> Option<Instant> {
        let known = self.stops.iter().rev().find(|(stopped, _)| *stopped <= epoch);
        known.map(|(_, at)| *at).filter(|at| at.0 > 0)
    }
}

fn missing(what: &str, process: &Process) -> LabError {
    LabError::Deadline { what: format!("{what}; {}", last_words(process)), waited: HANG }
}

/// What a process said last, for errors.
pub(crate) fn last_words(process: &Process) -> String {
    let said = process.said();
    let lines: Vec<&str> = said.lines().collect();
    let last = &lines[lines.len().saturating_sub(30)..];
    format!("pid {} said:\n{}", process.pid(), last.join("\n"))
}

/// Waits until a process, or another in its network namespace, listens on a TCP port. Looks at
/// the kernel's table, so the listener sees no connection.
pub fn wait_for_listener(process: &Process, port: u16, at_most: Duration) -> Result<(), LabError> {
    let deadline = Instant::now() + at_most;
    loop {
        if ["tcp", "tcp6"].iter().any(|table| listens(process, table, port)) {
            return Ok(());
        }
        if process.try_wait().is_some() || Instant::now() > deadline {
            return Err(missing(&format!("a listener on port {port}"), process));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Reads `/proc/PID/net/tcp` (proc_net_tcp(5)): local address in the second column, state in the
/// fourth, 0A is LISTEN.
fn listens(process: &Process, table: &str, port: u16) -> bool {
    let table = process.proc(&format!("net/{table}"));
    let local = format!(":{port:04X}");
    table.lines().skip(1).any(|line| {
        let mut columns = line.split_ascii_whitespace().skip(1);
        columns.next().is_some_and(|address| address.ends_with(&local))
            && columns.nth(1) == Some("0A")
    })
}

/// Waits until `server` accepts a connection from `client`.
pub fn wait_for_service(
    client: &Host,
    server: SocketAddr,
    at_most: Duration,
) -> Result<(), LabError> {
    let accepts = move || {
        let deadline = Instant::now() + at_most;
        while Instant::now() < deadline {
            let patience = Duration::from_millis(200);
            if std::net::TcpStream::connect_timeout(&server, patience).is_ok() {
                return true;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        false
    };
    let what = format!("a server at {server}");
    client.inside(accepts).then_some(()).ok_or(LabError::Deadline { what, waited: at_most })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str) -> Line {
        Line { at: Instant::default(), text: text.to_owned() }
    }

    #[test]
    fn events_are_told_from_what_a_guest_prints() {
        let said = r#"{"event":"failover","detect_ms":91.5,"apply_ms":0,"finalise_ms":4,
                       "address_ms":0.2,"epoch":17,"term":2,"more":true}"#;
        let Some(Event::Failover(failover)) = event(&line(said)) else { panic!("no failover") };
        assert_eq!((failover.epoch, failover.term), (17, 2));
        assert_eq!(event(&line(r#"{"event":"exit","status":3}"#)), Some(Event::Exit { status: 3 }));
        assert_eq!(event(&line(r#"{"guest":1}"#)), None);
        assert_eq!(event(&line("hello")), None);
    }
}
