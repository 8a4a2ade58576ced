//! A Redis that changes hosts: what scenes with several changes of primary have in common.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::clients::{Connection, Load, Outcome, Pace, Protocol, StoreLane, StorePlan, verify};
use crate::clock::Instant;
use crate::lab::Process;
use crate::lab::{LabError, Line, SERVICE_CIDR, SERVICE_V4};
use crate::protected::{Committed, Engine, Event, HANG, event, wait_for_service};
use crate::{Host, Lab};

const PORT: u16 = 6379;

/// Hosts, and the engine that protects a Redis on them.
pub struct Scene {
    /// The hosts.
    pub lab: Lab,
    /// The `hotspare` program and its settings.
    pub engine: Engine,
}

/// Clients of the Redis that hold their connections, whatever happens, and count what is in their
/// keys. Panics where a test has to fail.
pub struct Held {
    load: Load<StoreLane>,
    keys: usize,
}

impl Held {
    /// How long the load goes on before and after what happens.
    const CALM: Duration = Duration::from_millis(500);

    /// Starts so many clients.
    pub fn start(scene: &Scene, server: SocketAddr, lanes: usize, value_bytes: usize) -> Held {
        let keys = lanes * 50;
        let rate_per_s = lanes as f64 * 70.0;
        let pace = Pace { rate_per_s, lanes, reply_at_most: HANG, connect_at_most: HANG };
        let protocol = Protocol::Redis;
        let plan = StorePlan { protocol, keys, value_bytes, writes: 0.5, seed: 7 };
        let load = Load::start(scene.lab.client(), server, pace, plan.sessions(lanes), HANG);
        Held { load, keys }
    }

    /// Waits until requests from after this instant are answered, and some time more.
    pub fn goes_on(&self, what: &str, process: &Process) {
        let now = Instant::now();
        assert!(self.load.answered_after(now, HANG), "{what}: no answer\n{}", process.said());
        (Instant::now() + Self::CALM).sleep_until();
    }

    /// Whether a request from after `instant` is answered in time.
    pub fn answered_after(&self, instant: Instant, at_most: Duration) -> bool {
        self.load.answered_after(instant, at_most)
    }

    /// Ends the load; nothing may have happened to it.
    pub fn noticed_nothing(self) {
        let lanes = self.load.finish();
        let verdict = verify(&lanes, None);
        assert_eq!(verdict.wrongs, Vec::<String>::new());
        assert_eq!(lanes.iter().map(|lane| lane.reconnects).sum::<u64>(), 0, "connections broke");
        let replies = lanes.iter().flat_map(|lane| &lane.replies);
        assert_eq!(replies.filter(|reply| reply.outcome != Outcome::Good).count(), 0);
        assert_eq!(verdict.keys_verified, self.keys);
    }
}

impl Scene {
    /// Makes so many hosts. Panics where a test has to fail.
    pub fn new(hosts: usize, epoch: Duration) -> Scene {
        let binary = Engine::built().expect("build the program first: cargo build --bin hotspare");
        Scene::with(binary, hosts, epoch).expect("hosts")
    }

    fn with(binary: PathBuf, hosts: usize, epoch: Duration) -> Result<Scene, LabError> {
        let lab = Lab::new(hosts)?;
        let service_cidr = Some(SERVICE_CIDR.to_owned());
        let engine = Engine { binary, epoch, service_cidr, replicated: vec![], more: vec![] };
        Ok(Scene { lab, engine })
    }

    /// A host.
    pub fn host(&self, index: usize) -> &Arc<Host> {
        self.lab.host(index)
    }

    /// Starts the Redis on host 0 with spares on `spares`; returns when it serves.
    pub fn run(&self, spares: &[usize]) -> Process {
        self.run_at((SERVICE_V4, PORT).into(), spares)
    }

    /// As [`Scene::run`], and it serves at `server`.
    pub fn run_at(&self, server: SocketAddr, spares: &[usize]) -> Process {
        let spares: Vec<&Host> = spares.iter().map(|index| &**self.host(*index)).collect();
        let primary = self.engine.run(self.host(0), &spares, &redis()).expect("start");
        wait_for_service(self.lab.client(), server, HANG).expect("the Redis serves");
        primary
    }

    /// `hotspare` with these words on a host, and whether it succeeded.
    pub fn hotspare(&self, host: usize, words: &[&str]) -> Result<String, String> {
        let mut command = Command::new(&self.engine.binary);
        self.host(host).run(command.args(words), HANG).map_err(|error| error.to_string())
    }

    /// Starts a spare that dials `primary`, and listens wherever it likes.
    pub fn joining_spare(&self, host: usize, primary: SocketAddr) -> Process {
        let mut command = Command::new(&self.engine.binary);
        command.args(["spare", "--json", "--insecure", "--join", &primary.to_string()]);
        self.host(host).spawn(&mut command).expect("start a spare")
    }

    /// Waits until the service answers.
    pub fn serves(&self) {
        let server = (SERVICE_V4, PORT).into();
        wait_for_service(self.lab.client(), server, HANG).expect("the Redis serves");
    }

    /// Writes a key.
    pub fn set(&self, key: &str, value: &str) {
        let (key, value) = (key.to_owned(), value.to_owned());
        self.ask(move |connection| {
            let mut request = Vec::new();
            Protocol::Redis.put_set(&mut request, &key, &value);
            connection.send(&request)?;
            Protocol::Redis.take_set(connection)
        });
    }

    /// Reads a key.
    pub fn get(&self, key: &str) -> Option<String> {
        let key = key.to_owned();
        self.ask(move |connection| {
            let mut request = Vec::new();
            Protocol::Redis.put_get(&mut request, &key);
            connection.send(&request)?;
            Protocol::Redis.take_get(connection)
        })
    }

    fn ask<T: Send + 'static>(
        &self,
        ask: impl Fn(&mut Connection) -> Result<T, crate::clients::ClientError> + Send + 'static,
    ) -> T {
        self.lab.client().inside(move || {
            let deadline = Instant::now() + HANG;
            loop {
                let server = (SERVICE_V4, PORT).into();
                let answer = Connection::open(server, Duration::from_secs(1), HANG)
                    .and_then(|mut connection| ask(&mut connection));
                match answer {
                    Ok(answer) => return answer,
                    Err(error) if Instant::now() > deadline => panic!("no answer: {error}"),
                    Err(_) => std::thread::sleep(Duration::from_millis(5)),
                }
            }
        })
    }
}

/// Waits until so many spares of the primary on host 0 could take over. Panics if that takes too
/// long.
pub fn await_ready(scene: &Scene, primary: &Process, wanted: u64) {
    let deadline = Instant::now() + HANG;
    while Engine::status(scene.host(0), &scene.engine.binary, "ready") != Some(wanted) {
        let late = Instant::now() > deadline;
        assert!(!late, "{wanted} spares ready:\n{}", primary.said());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The Redis of these scenes: no files.
fn redis() -> Vec<String> {
    let port = PORT.to_string();
    let words = ["redis-server", "--port", &port, "--bind", "*", "-::*", "--save", ""];
    let more = ["--appendonly", "no", "--protected-mode", "no"];
    words.iter().chain(&more).map(|word| (*word).to_owned()).collect()
}

/// How often an event of a kind was told so far.
pub fn count(process: &Process, wanted: impl Fn(&Event) -> bool) -> usize {
    process.stdout().lines().iter().filter_map(event).filter(|event| wanted(event)).count()
}

/// Takeovers that this spare has told of so far.
pub fn takeovers(spare: &Process) -> usize {
    count(spare, |event| matches!(event, Event::Failover(_)))
}

/// Waits until a primary has told so many times that it is protected.
pub fn protected_times(primary: &Process, times: usize) {
    let mut seen = 0;
    let protected = |line: &Line| {
        seen += usize::from(matches!(event(line), Some(Event::Protected { .. })));
        (seen >= times).then_some(())
    };
    let found = primary.stdout().find(HANG, protected);
    assert!(found.is_some(), "{times} times protected; it said:\n{}", primary.said());
}

/// Waits until everything that has happened by now is committed.
pub fn settle(primary: &Process) {
    let now = Instant::now();
    let committed = |line: &Line| match event(line)? {
        Event::Epoch { stop_ns, .. } => (Instant(stop_ns) > now).then_some(()),
        _ => None,
    };
    assert!(primary.stdout().find(HANG, committed).is_some(), "commits:\n{}", primary.said());
    assert!(Committed::of(primary).last().is_some());
}

/// Waits until a program has written `words` to its standard error.
pub fn says(process: &Process, words: &str) {
    let found = process.stderr().find(HANG, |line| line.text.contains(words).then_some(()));
    assert!(found.is_some(), "it does not say {words:?}:\n{}", process.said());
}

/// The living descendants of a process with this name.
pub fn descendants(ancestor: i32, name: &str) -> Vec<i32> {
    let mut parents = Vec::new();
    for entry in std::fs::read_dir("/proc").expect("/proc").flatten() {
        let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        // PID (NAME) STATE PARENT …
        let Some((head, rest)) = stat.rsplit_once(") ") else { continue };
        let Some((pid, command)) = head.split_once(" (") else { continue };
        let mut words = rest.split(' ');
        let (state, parent) = (words.next(), words.next());
        if let (Ok(pid), Some(Ok(parent))) = (pid.parse::<i32>(), parent.map(str::parse::<i32>))
            && state != Some("Z")
        {
            parents.push((pid, parent, command.to_owned()));
        }
    }
    let parent_of = |pid: i32| parents.iter().find(|(own, ..)| *own == pid).map(|all| all.1);
    let descends = |pid: i32| {
        let line = std::iter::successors(Some(pid), |pid| parent_of(*pid));
        line.skip(1).take(64).any(|pid| pid == ancestor)
    };
    let named = parents.iter().filter(|(pid, _, own)| own == name && descends(*pid));
    named.map(|(pid, ..)| *pid).collect()
}

/// Sends a signal to the Redis (or its ghost) below this agent, on this machine; its process id.
pub fn signal_redis(agent: &Process, signal: Signal) -> i32 {
    let found = descendants(agent.pid(), "redis-server");
    let [pid] = found[..] else { panic!("{} Redis below {}", found.len(), agent.pid()) };
    kill(Pid::from_raw(pid), signal).expect("signal the Redis");
    pid
}
