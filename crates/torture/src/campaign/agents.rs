//! Two hosts that change places again and again: one has the guest, the other is its spare.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nix::sys::signal::Signal;

use super::Plan;
use crate::clock::Instant;
use crate::etcd::Etcd;
use crate::lab::{LabError, Line, Process, SERVICE_CIDR, SERVICE_V4};
use crate::programs::{Program, WORK_DIR};
use crate::protected::{Engine, Event, HANG, STREAM_PORT, event, wait_for_service};
use crate::{Host, Lab};

/// Agents that have ended whose words are kept.
const RETIRED_MAX: usize = 6;
/// The exit status of an agent whose guest runs elsewhere.
const FENCED: i32 = 75;

/// A host's agent.
struct Seat {
    agent: Process,
    /// It was started with the guest.
    is_first: bool,
    /// The campaign has killed it.
    is_killed: bool,
    /// The host is to be started anew before anything can run there.
    is_dead: bool,
}

/// The hosts and what runs there.
pub(super) struct Agents {
    engine: Engine,
    spare_words: Vec<String>,
    seats: [Seat; 2],
    retired: Vec<(String, Process)>,
    started: usize,
    guest: String,
    is_direct: bool,
    /// Where the program is reached.
    pub(super) service: SocketAddr,
    etcd: Etcd,
    /// The two hosts, and one for the arbiter.
    pub(super) lab: Lab,
}

impl Agents {
    /// Starts the program on the first host, and a spare on the second.
    pub(super) fn start(program: &Program, plan: &Plan) -> Result<Agents, LabError> {
        let lab = Lab::new(3)?;
        for host in &lab.hosts()[..2] {
            let work = host.outside(WORK_DIR);
            let doing = |source| LabError::Io { doing: format!("make {}", work.display()), source };
            fs::create_dir_all(&work).map_err(doing)?;
            program.check.prepare(host)?;
        }
        let etcd = Etcd::start(lab.host(2));
        let place = etcd.place();
        let listen = lab.host(0).socket(STREAM_PORT).to_string();
        let mut both = vec!["--arbiter".to_owned(), place];
        if let Some(silence) = plan.silence {
            both.extend(["--silence".to_owned(), format!("{}ms", silence.as_millis())]);
        }
        let words = ["--guarantee", "output-commit", "--guest", program.name, "--listen", &listen];
        let mut more: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        more.extend(both.iter().chain(&plan.run_words).cloned());
        let engine = Engine {
            binary: plan.binary.clone(),
            epoch: plan.epoch,
            service_cidr: Some(SERVICE_CIDR.to_owned()),
            replicated: program.writes.then(|| WORK_DIR.to_owned()).into_iter().collect(),
            more,
        };
        let service = (SERVICE_V4, program.port).into();
        let run = engine.run(lab.host(0), &[], &program.command)?;
        wait_for_service(lab.client(), service, HANG)?;
        let spare = spare_of(&engine, lab.host(1), lab.host(0), &both)?;
        let seat = |agent, is_first| Seat { agent, is_first, is_killed: false, is_dead: false };
        let seats = [seat(run, true), seat(spare, false)];
        let (spare_words, retired) = (both, Vec::new());
        let guest = program.name.to_owned();
        let is_direct = plan.run_words.iter().any(|word| word == "direct");
        Ok(Agents {
            engine,
            spare_words,
            seats,
            retired,
            started: 2,
            guest,
            is_direct,
            service,
            etcd,
            lab,
        })
    }

    /// A host of the two.
    pub(super) fn host(&self, index: usize) -> &Arc<Host> {
        self.lab.host(index)
    }

    /// The host of the arbiter.
    pub(super) fn arbiter(&self) -> &Arc<Host> {
        self.lab.host(2)
    }

    fn seat(&mut self, index: usize) -> &mut Seat {
        &mut self.seats[index]
    }

    /// The term in which this host's agent runs the guest, if it does.
    fn reign(&self, index: usize) -> Option<u64> {
        let seat = &self.seats[index];
        if seat.is_killed || seat.agent.try_wait().is_some() {
            return None;
        }
        let term = |line: &Line| match event(line)? {
            Event::Failover(failover) => Some(failover.term),
            Event::Protected { .. } | Event::Epoch { .. } | Event::Exit { .. } => None,
        };
        let found = seat
            .agent
            .stdout()
            .last(|line| if line.text.contains("failover") { term(line) } else { None });
        found.or(seat.is_first.then_some(1))
    }

    /// The host that has the guest: the one of the newest term, if an old one still lives.
    pub(super) fn primary(&self) -> Option<usize> {
        (0..2).filter(|index| self.reign(*index).is_some()).max_by_key(|index| self.reign(*index))
    }

    /// The newest term.
    pub(super) fn term(&self) -> u64 {
        (0..2).filter_map(|index| self.reign(index)).max().unwrap_or(0)
    }

    /// Whether a primary's last word of it was that a spare could take over.
    fn is_protected(&self, index: usize) -> bool {
        let said = |line: &Line| match &*line.text {
            text if text.contains(r#""event":"protected""#) => Some(true),
            text if text.contains(r#""event":"unprotected""#) => Some(false),
            _ => None,
        };
        self.seats[index].agent.stdout().last(said) == Some(true) && self.is_on_its_path(index)
    }

    /// Whether clients reach the guest of this primary as they are meant to. Until then connections
    /// that are just being made break with the host (LIMITS.md).
    fn is_on_its_path(&self, index: usize) -> bool {
        let lines = self.seats[index].agent.stderr().lines();
        let mut through = None;
        for line in &lines {
            let after = |words: &str| line.text.split_once(words).map(|(_, rest)| rest);
            if let Some(spare) = after("clients reach the guest through the spare ") {
                through = spare.split(' ').next();
            } else if let Some(spare) = after("the stream to spare ") {
                // That of a spare of before may end late.
                through = through.filter(|name| spare.split(' ').next() != Some(name));
            }
        }
        self.is_direct || through.is_some()
    }

    /// The agent of a host.
    pub(super) fn agent(&self, index: usize) -> &Process {
        &self.seats[index].agent
    }

    /// The host dies: first its cable.
    pub(super) fn kill_host(&mut self, index: usize) -> Result<Instant, LabError> {
        let death = self.host(index).kill()?;
        let seat = self.seat(index);
        (seat.is_killed, seat.is_dead) = (true, true);
        Ok(death)
    }

    /// All programs of the host die, its kernel lives.
    pub(super) fn kill_processes(&mut self, index: usize) -> Result<Instant, LabError> {
        let death = Instant::now();
        self.seat(index).is_killed = true;
        self.host(index).kill_processes()?;
        Ok(death)
    }

    /// The agent dies alone.
    pub(super) fn kill_agent(&mut self, index: usize) -> Result<Instant, LabError> {
        let death = Instant::now();
        self.seat(index).is_killed = true;
        self.seats[index].agent.signal(Signal::SIGKILL)?;
        Ok(death)
    }

    /// Starts a new spare where none runs any more, and waits until the guest is protected.
    pub(super) fn protect(&mut self) -> Result<(), String> {
        let deadline = Instant::now() + HANG;
        loop {
            for index in 0..2 {
                self.look_after(index)?;
            }
            if let Some(primary) = self.primary()
                && self.is_protected(primary)
                && self.seats[1 - primary].agent.try_wait().is_none()
            {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(format!("not protected again in {HANG:?}"));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Replaces the agent of a host if it has ended; an end that nobody has asked for is an error.
    fn look_after(&mut self, index: usize) -> Result<(), String> {
        let seat = &self.seats[index];
        let Some(status) = seat.agent.try_wait() else { return Ok(()) };
        if !seat.is_killed && status.code() != Some(FENCED) {
            let name = self.host(index).name();
            return Err(format!("the agent on {name} has ended by itself: {status}"));
        }
        let other = 1 - index;
        if self.reign(other).is_none() {
            let is_over = self.seats[other].agent.try_wait().is_some();
            let name = self.host(other).name();
            return if is_over { Err(format!("{name} has no guest either")) } else { Ok(()) };
        }
        let started = self.replace(index, other);
        started.map_err(|error| format!("a new spare on {}: {error}", self.host(index).name()))
    }

    fn replace(&mut self, index: usize, primary: usize) -> Result<(), LabError> {
        let (host, primary) = (Arc::clone(self.host(index)), Arc::clone(self.host(primary)));
        if self.seats[index].is_dead {
            host.boot()?;
        }
        let agent = spare_of(&self.engine, &host, &primary, &self.spare_words)?;
        let new = Seat { agent, is_first: false, is_killed: false, is_dead: false };
        let old = std::mem::replace(self.seat(index), new);
        self.retired.push((format!("{}-{:04}", host.name(), self.started), old.agent));
        self.started += 1;
        if self.retired.len() > RETIRED_MAX {
            self.retired.remove(0);
        }
        Ok(())
    }

    /// Whether the campaign has killed the one host that had the guest alone, as the arbiter's
    /// record shows: the host that was believed to be the spare had a newer term, or the primary
    /// had struck its spare out.
    pub(super) fn was_hit_alone(&self, term: u64) -> bool {
        let killed = self.seats.iter().any(|seat| seat.is_killed);
        let fenced = self.seats.iter().any(|seat| {
            !seat.is_killed && seat.agent.try_wait().is_some_and(|end| end.code() == Some(FENCED))
        });
        let record = self.etcd.record(&self.guest);
        let no_heir = record["heirs"].as_array().is_some_and(Vec::is_empty);
        let newer = record["term"].as_u64().is_some_and(|found| found > term);
        killed && no_heir && (newer && fenced || !newer && !fenced && self.primary().is_none())
    }

    /// Writes what all agents have said into a new directory.
    pub(super) fn keep_logs(&self, dir: &Path) -> std::io::Result<()> {
        fs::create_dir_all(dir)?;
        let name = |index: usize| format!("{}-now", self.host(index).name());
        let now = (0..2).map(|index| (name(index), &self.seats[index].agent));
        let before = self.retired.iter().map(|(name, agent)| (name.clone(), agent));
        for (name, agent) in now.chain(before) {
            let put = |suffix: &str, lines: Vec<Line>| {
                let line = |line: &Line| format!("{:>17} {}\n", line.at.0, line.text);
                let text: String = lines.iter().map(line).collect();
                fs::write(dir.join(format!("{name}.{suffix}")), text)
            };
            put("stdout", agent.stdout().lines())?;
            put("stderr", agent.stderr().lines())?;
            let end = format!("pid {}: {:?}\n", agent.pid(), agent.try_wait());
            fs::write(dir.join(format!("{name}.end")), end)?;
        }
        let record = self.etcd.ctl(&["get", "--prefix", "/hs"]).unwrap_or_else(|error| error);
        fs::write(dir.join("arbiter"), record)?;
        self.keep_histories(dir)
    }

    fn keep_histories(&self, dir: &Path) -> std::io::Result<()> {
        for host in &self.lab.hosts()[..2] {
            let state = host.outside("/var/lib/hotspare");
            let guests = fs::read_dir(&state).into_iter().flatten().flatten();
            let histories = guests.map(|guest| guest.path().join("history.jsonl"));
            for history in histories.filter(|history: &PathBuf| history.exists()) {
                fs::copy(history, dir.join(format!("{}.history", host.name())))?;
            }
        }
        Ok(())
    }
}

fn spare_of(
    engine: &Engine,
    host: &Host,
    primary: &Host,
    words: &[String],
) -> Result<Process, LabError> {
    let primary = primary.socket(STREAM_PORT).to_string();
    let mut all = vec!["--join", &primary];
    all.extend(words.iter().map(String::as_str));
    engine.spare_with(host, &all)
}
