//! Hosts that change places again and again: one has the guest, the others are its spares.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hotspare_kernel::kill_point::{KillPoint, VARIABLE};
use nix::sys::signal::Signal;

use super::Plan;
use crate::clock::Instant;
use crate::etcd::Etcd;
use crate::lab::strain::DISK;
use crate::lab::{LabError, Line, Process, SERVICE_CIDR, SERVICE_V4};
use crate::programs::{Program, WORK_DIR};
use crate::protected::{Engine, Event, HANG, STREAM_PORT, event, wait_for_service};
use crate::{Host, Lab};

/// Agents that have ended whose words are kept.
const RETIRED_MAX: usize = 6;
/// A primary that has not noticed the death of its only spare by then never will.
const UNNOTICED_AT_MOST: Duration = Duration::from_secs(3);
/// The exit status of an agent whose guest runs elsewhere.
const FENCED: i32 = 75;

/// Names the file by which processes of a host enter the cgroup of its memory.
const MEMORY_GROUP: &str = "/srv/hotspare-lab/memory-group";
/// Names the point at which an agent of a host is to die.
const KILL_POINT: &str = "/srv/hotspare-lab/kill.point";
/// So it is named when one has.
const REACHED: &str = "/srv/hotspare-lab/kill.reached";

/// A host's agent.
struct Seat {
    agent: Process,
    /// It was started with the guest.
    is_first: bool,
    /// The campaign has killed it.
    is_killed: bool,
    /// The host is to be started anew before anything can run there.
    is_dead: bool,
    /// When its end was seen.
    ended: Option<Instant>,
}

impl Seat {
    fn of(agent: Process) -> Seat {
        Seat { agent, is_first: false, is_killed: false, is_dead: false, ended: None }
    }
}

/// The hosts and what runs there.
pub(crate) struct Agents {
    engine: Engine,
    spare_words: Vec<String>,
    seats: Vec<Seat>,
    retired: Vec<(String, Process)>,
    started: usize,
    reached: usize,
    guest: String,
    is_direct: bool,
    /// Where the program is reached.
    pub(crate) service: SocketAddr,
    etcd: Etcd,
    /// The hosts, and one for the arbiter.
    pub(crate) lab: Lab,
}

impl Agents {
    /// Starts the program on the first host, and spares on the others.
    pub(crate) fn start(program: &Program, plan: &Plan) -> Result<Agents, LabError> {
        let Ground { lab, binary } = Ground::make(plan)?;
        for host in &lab.hosts()[..plan.hosts] {
            let work = host.outside(WORK_DIR);
            let doing = |source| LabError::Io { doing: format!("make {}", work.display()), source };
            fs::create_dir_all(&work).map_err(doing)?;
            program.check.prepare(host)?;
        }
        let etcd = Etcd::start(lab.host(plan.hosts));
        let place = etcd.place();
        let listen = lab.host(0).socket(STREAM_PORT).to_string();
        let mut both = vec!["--arbiter".to_owned(), place];
        if let Some(silence) = plan.silence {
            both.extend(["--silence".to_owned(), format!("{}ms", silence.as_millis())]);
        }
        let words = ["--guarantee", plan.guarantee, "--guest", program.name, "--listen", &listen];
        let mut more: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        more.extend(both.iter().chain(&plan.run_words).cloned());
        let engine = Engine {
            binary,
            epoch: plan.epoch,
            service_cidr: Some(SERVICE_CIDR.to_owned()),
            replicated: program.writes.then(|| WORK_DIR.to_owned()).into_iter().collect(),
            more,
        };
        let service = (SERVICE_V4, program.port).into();
        let run = engine.run(lab.host(0), &[], &program.command)?;
        wait_for_service(lab.client(), service, HANG)?;
        let mut seats = vec![Seat { is_first: true, ..Seat::of(run) }];
        for spare in &lab.hosts()[1..plan.hosts] {
            seats.push(Seat::of(spare_of(&engine, spare, lab.host(0), &both)?));
        }
        let (spare_words, retired) = (both, Vec::new());
        let guest = program.name.to_owned();
        let is_direct = plan.run_words.iter().any(|word| word == "direct");
        Ok(Agents {
            engine,
            spare_words,
            seats,
            retired,
            started: plan.hosts,
            reached: 0,
            guest,
            is_direct,
            service,
            etcd,
            lab,
        })
    }

    /// How many hosts there are, without the arbiter's.
    pub(crate) fn count(&self) -> usize {
        self.seats.len()
    }

    /// A host of them.
    pub(crate) fn host(&self, index: usize) -> &Arc<Host> {
        self.lab.host(index)
    }

    /// The host of the arbiter.
    pub(crate) fn arbiter(&self) -> &Arc<Host> {
        self.lab.host(self.count())
    }

    /// Whether somebody could take over from this primary.
    pub(crate) fn spare(&self, primary: usize) -> Option<usize> {
        let lives = |index: &usize| self.seats[*index].agent.try_wait().is_none();
        (0..self.count()).filter(|index| *index != primary).find(lives)
    }

    /// The arbiter dies.
    pub(crate) fn kill_arbiter(&mut self) {
        self.etcd.kill();
    }

    /// It comes back with what it had.
    pub(crate) fn start_arbiter(&mut self) {
        self.etcd.start_again();
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
    pub(crate) fn primary(&self) -> Option<usize> {
        (0..self.count())
            .filter(|index| self.reign(*index).is_some())
            .max_by_key(|index| self.reign(*index))
    }

    /// When agents have taken over, as far as their words are kept.
    pub(crate) fn takeovers(&self) -> Vec<Instant> {
        let agents = self.seats.iter().map(|seat| &seat.agent);
        let agents = agents.chain(self.retired.iter().map(|(_, agent)| agent));
        let is_failover = |line: &Line| {
            let found = line.text.contains("failover").then(|| event(line)).flatten();
            matches!(found, Some(Event::Failover(_)))
        };
        let lines = agents.flat_map(|agent| agent.stdout().lines());
        lines.filter(is_failover).map(|line| line.at).collect()
    }

    /// The newest term.
    pub(crate) fn term(&self) -> u64 {
        (0..self.count()).filter_map(|index| self.reign(index)).max().unwrap_or(0)
    }

    /// Whether a primary's last word of it was that a spare could take over.
    fn is_protected(&self, index: usize) -> bool {
        Engine::last_protection(self.agent(index)) == Some(true) && self.is_on_its_path(index)
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
    pub(crate) fn agent(&self, index: usize) -> &Process {
        &self.seats[index].agent
    }

    /// The host dies: first its cable.
    pub(crate) fn kill_host(&mut self, index: usize) -> Result<Instant, LabError> {
        let death = self.host(index).kill()?;
        let seat = self.seat(index);
        (seat.is_killed, seat.is_dead) = (true, true);
        Ok(death)
    }

    /// All programs of the host die, its kernel lives.
    pub(crate) fn kill_processes(&mut self, index: usize) -> Result<Instant, LabError> {
        let death = Instant::now();
        self.seat(index).is_killed = true;
        self.host(index).kill_processes()?;
        Ok(death)
    }

    /// The agent dies alone.
    pub(crate) fn kill_agent(&mut self, index: usize) -> Result<Instant, LabError> {
        let death = Instant::now();
        self.seat(index).is_killed = true;
        self.seats[index].agent.signal(Signal::SIGKILL)?;
        Ok(death)
    }

    /// All processes of the guest are killed on the host that has it (it goes on as long as one
    /// lives); their process ids.
    pub(crate) fn kill_guest(&mut self, index: usize) -> Result<Vec<i32>, LabError> {
        let found = processes_of_guest(self.seats[index].agent.pid());
        if found.is_empty() {
            let what = "the processes of the guest".to_owned();
            return Err(LabError::Deadline { what, waited: Duration::ZERO });
        }
        self.seat(index).is_killed = true;
        for pid in &found {
            // It may have ended in this very moment.
            let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(*pid), Signal::SIGKILL);
        }
        Ok(found)
    }

    /// The agent of this host is to die at this point.
    pub(crate) fn arm(&self, index: usize, point: KillPoint) -> Result<(), LabError> {
        // Whole from the begin: somebody may look at any time.
        let draft = self.host(index).outside(KILL_POINT).with_extension("draft");
        write(&draft, point.name())?;
        let done = fs::rename(&draft, self.host(index).outside(KILL_POINT));
        done.map_err(|source| LabError::Io { doing: "arm a kill point".to_owned(), source })
    }

    /// No agent of this host is to die at a point any more.
    pub(crate) fn disarm(&self, index: usize) {
        // Where it is not, an agent has renamed it.
        let _ = fs::remove_file(self.host(index).outside(KILL_POINT));
    }

    /// How many agents have died at the point that they were to.
    pub(crate) fn reached(&self) -> usize {
        self.reached + (0..self.count()).filter(|index| self.has_reached(*index)).count()
    }

    fn has_reached(&self, index: usize) -> bool {
        self.host(index).outside(REACHED).exists()
    }

    /// Starts a new spare where none runs any more, and waits until the guest is protected.
    pub(crate) fn protect(&mut self) -> Result<(), String> {
        let deadline = Instant::now() + HANG;
        loop {
            for index in 0..self.count() {
                self.look_after(index)?;
            }
            if let Some(primary) = self.primary()
                && self.is_protected(primary)
                && self.all_follow(primary)
            {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(format!("not protected again in {HANG:?}"));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Whether all others are spares of this primary. One is, when the primary says that it is
    /// protected; more have to be counted.
    fn all_follow(&self, primary: usize) -> bool {
        let others = (0..self.count()).filter(|index| *index != primary);
        let all_live = others.clone().all(|index| self.seats[index].agent.try_wait().is_none());
        let wanted = others.count() as u64;
        let ready = || Engine::status(self.host(primary), &self.engine.binary, "ready");
        all_live && (wanted == 1 || ready() == Some(wanted))
    }

    /// Replaces the agent of a host if it has ended; an end that nobody has asked for is an error.
    fn look_after(&mut self, index: usize) -> Result<(), String> {
        let seat = &self.seats[index];
        let Some(status) = seat.agent.try_wait() else { return Ok(()) };
        let is_killed = seat.is_killed || self.has_reached(index);
        if !is_killed && status.code() != Some(FENCED) {
            let name = self.host(index).name();
            return Err(format!("the agent on {name} has ended by itself: {status}"));
        }
        let first_seen = *self.seats[index].ended.get_or_insert_with(Instant::now);
        let Some(primary) = self.primary() else {
            let is_over = self.seats.iter().all(|seat| seat.agent.try_wait().is_some());
            return if is_over { Err("no host has the guest".to_owned()) } else { Ok(()) };
        };
        // Until it knows, its last word of being protected is of the one that is dead.
        let knows = self.count() > 2 || Engine::last_protection(self.agent(primary)) != Some(true);
        if !knows && Instant::now() < first_seen + UNNOTICED_AT_MOST {
            return Ok(());
        }
        let started = self.replace(index, primary);
        started.map_err(|error| format!("a new spare on {}: {error}", self.host(index).name()))
    }

    fn replace(&mut self, index: usize, primary: usize) -> Result<(), LabError> {
        let (host, primary) = (Arc::clone(self.host(index)), Arc::clone(self.host(primary)));
        if self.seats[index].is_dead {
            host.boot()?;
        }
        if fs::remove_file(host.outside(REACHED)).is_ok() {
            self.reached += 1;
        }
        let agent = spare_of(&self.engine, &host, &primary, &self.spare_words)?;
        let old = std::mem::replace(self.seat(index), Seat::of(agent));
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
    pub(crate) fn was_hit_alone(&self, term: u64) -> bool {
        let killed = self.seats.iter().any(|seat| seat.is_killed)
            || (0..self.count()).any(|index| self.has_reached(index));
        let fenced = self.seats.iter().any(|seat| {
            !seat.is_killed && seat.agent.try_wait().is_some_and(|end| end.code() == Some(FENCED))
        });
        let record = self.etcd.record(&self.guest);
        let no_heir = record["heirs"].as_array().is_some_and(Vec::is_empty);
        let newer = record["term"].as_u64().is_some_and(|found| found > term);
        killed && no_heir && (newer && fenced || !newer && !fenced && self.primary().is_none())
    }

    /// Writes what all agents have said into a new directory.
    pub(crate) fn keep_logs(&self, dir: &Path) -> std::io::Result<()> {
        fs::create_dir_all(dir)?;
        let name = |index: usize| format!("{}-now", self.host(index).name());
        let now = (0..self.count()).map(|index| (name(index), &self.seats[index].agent));
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
        for host in &self.lab.hosts()[..self.count()] {
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

/// The processes below an agent that are in a pid namespace of the guest and not its init, which
/// is ours; the oldest first.
fn processes_of_guest(agent: i32) -> Vec<i32> {
    let mut known = Vec::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let status = fs::read_to_string(entry.path().join("status")).unwrap_or_default();
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
        let pids = field("NSpid:").unwrap_or_default().split_ascii_whitespace();
        let pids: Vec<i32> = pids.filter_map(|pid| pid.parse().ok()).collect();
        let parent = field("PPid:").and_then(|parent| parent.trim().parse::<i32>().ok());
        if let ([pid, ..], Some(parent)) = (&pids[..], parent) {
            known.push((*pid, parent, pids.len() > 1 && pids.last() > Some(&1)));
        }
    }
    let parent_of = |pid: &i32| known.iter().find(|(own, ..)| own == pid).map(|all| all.1);
    let is_below =
        |pid: i32| std::iter::successors(Some(pid), parent_of).take(64).any(|above| above == agent);
    let own = known.iter().filter(|(pid, _, is_guest)| *is_guest && is_below(*pid));
    let mut own: Vec<i32> = own.map(|(pid, ..)| *pid).collect();
    own.sort_unstable();
    own
}

/// The hosts of a plan, before anything runs there.
struct Ground {
    lab: Lab,
    /// What starts the `hotspare` program.
    binary: PathBuf,
}

impl Ground {
    fn make(plan: &Plan) -> Result<Ground, LabError> {
        let count = plan.hosts + 1;
        let wires = if plan.wires { count } else { 0 };
        let lab = Lab::furnished(count, wires, plan.disk_bytes)?;
        for host in &lab.hosts()[..plan.hosts] {
            let group = host.memory_group().join("cgroup.procs");
            write(&host.outside(MEMORY_GROUP), &group.display().to_string())?;
        }
        let binary = if plan.is_strained { wrap(&lab, plan)? } else { plan.binary.clone() };
        Ok(Ground { lab, binary })
    }
}

/// A script that starts the program where its memory can be limited and its kill points be
/// reached, with its passing files on the disk of the host.
fn wrap(lab: &Lab, plan: &Plan) -> Result<PathBuf, LabError> {
    let script = lab.dir().join("hotspare");
    let text = format!(
        "#!/bin/sh\necho $$ > \"$(cat {MEMORY_GROUP})\"\n\
         exec env TMPDIR={DISK} {VARIABLE}={KILL_POINT} {} \"$@\"\n",
        plan.binary.display()
    );
    write(&script, &text)?;
    let doing = |source| LabError::Io { doing: format!("change {}", script.display()), source };
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).map_err(doing)?;
    Ok(script)
}

fn write(path: &Path, text: &str) -> Result<(), LabError> {
    let doing = |source| LabError::Io { doing: format!("write {}", path.display()), source };
    fs::write(path, text).map_err(doing)
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
